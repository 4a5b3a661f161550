"""TRL: `SFTTrainer` on conversations, as its guides to speed and memory say.

python -m benchmarks.race.peers.run_trl JOB RESULT [setting=JSON ...]
"""
# pyright: basic, reportMissingImports=false

import sys
from pathlib import Path

import torch
import transformers.models.glm4.modeling_glm4  # noqa: F401  (loaded late otherwise, and counted as its memory)
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from benchmarks.race.peers.clock import Task, task


def settings(given: Task) -> SFTConfig:
    job = given.job
    options = {
        "output_dir": str(given.scratch),
        "max_steps": job.steps,
        "learning_rate": job.learning_rate,
        "lr_scheduler_type": "linear",
        "max_length": job.max_tokens,
        "assistant_only_loss": True,
        "chat_template_path": str(Path(__file__).with_name("glm4_training.jinja")),
        # For speed.
        "packing": True,  # rows of max_length; one of them holds about four samples
        "per_device_train_batch_size": 1,
        "train_sampling_strategy": "sequential",
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        # What the measurement needs.
        "use_cpu": True,
        "seed": job.seed,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    if job.method == "lora":  # its default is fp32, which full fine-tuning needs and frozen weights don't
        options["model_init_kwargs"] = {"dtype": "bfloat16"}
    return SFTConfig(**(options | given.settings))


def main(given: Task) -> None:
    job = given.job
    torch.set_num_threads(job.threads)
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=8,
        lora_alpha=32,
        lora_dropout=0.1,
        target_modules=["q_proj", "k_proj", "v_proj"],
    )
    clock = given.clock()
    trainer = SFTTrainer(
        model=job.model,
        args=settings(given),
        train_dataset=load_dataset("json", data_files=job.data, split="train", cache_dir=str(given.scratch)),
        peft_config=lora if job.method == "lora" else None,
        callbacks=[clock],
    )
    trainer.train()
    given.hand_in(clock, "trl", "trl")


if __name__ == "__main__":
    main(task(sys.argv[1:]))
