"""ms-swift: `sft_main` on what would stand behind `swift sft`. It packs with FlashAttention only: not here.

python -m benchmarks.race.peers.run_swift JOB RESULT [setting=JSON ...]
"""
# pyright: basic, reportMissingImports=false

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers.models.glm4.modeling_glm4  # noqa: F401  (loaded late otherwise, and counted as its memory)
from swift import sft_main
from swift.callbacks import callbacks_map

from benchmarks.race.peers.clock import Task, task

ROLES = {"observation": "tool_response"}  # the others it calls as everybody does


def renamed(given: Task) -> Path:
    """The conversations with its names of roles."""
    given.scratch.mkdir(parents=True)
    out = given.scratch / "race.jsonl"
    with Path(given.job.data).open(encoding="utf-8") as lines, out.open("w", encoding="utf-8") as file:
        for line in lines:
            turns = [
                turn | {"role": ROLES.get(turn["role"], turn["role"])}
                for turn in json.loads(line)["messages"]
            ]
            file.write(json.dumps({"messages": turns}, ensure_ascii=False) + "\n")
    return out


def settings(given: Task) -> dict[str, Any]:
    job = given.job
    options: dict[str, Any] = {
        "model": job.model,
        "model_type": "glm4",
        "template": "glm4",
        "tuner_type": job.method,
        "dataset": str(renamed(given)),
        "max_length": job.max_tokens,
        "truncation_strategy": "right",
        "max_steps": job.steps,
        "learning_rate": job.learning_rate,
        "lr_scheduler_type": "linear",
        "weight_decay": 0.0,
        "adam_beta2": 0.999,
        "torch_dtype": "bfloat16",
        # For speed.
        "per_device_train_batch_size": job.batch,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
        "group_by_length": True,
        "train_dataloader_shuffle": True,  # or it does not group
        "attn_impl": "sdpa",
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        # What the measurement needs.
        "dataset_shuffle": False,
        "split_dataset_ratio": 0.0,
        "use_cpu": True,
        "seed": job.seed,
        "output_dir": str(given.scratch / "out"),
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "callbacks": "clock",
    }
    if job.method == "lora":
        options |= {
            "lora_rank": 8,
            "lora_alpha": 32,
            "lora_dropout": 0.1,
            "target_modules": "q_proj k_proj v_proj",
        }
    return options | given.settings


def words(options: dict[str, Any]) -> list[str]:
    """As on its command line."""
    return [word for name, value in options.items() for word in (f"--{name}", *str(value).split(" "))]


def main(given: Task) -> None:
    torch.set_num_threads(given.job.threads)
    clock = given.clock()
    callbacks_map["clock"] = lambda args, trainer: clock  # how its plug-ins add theirs
    sft_main(words(settings(given)))
    given.hand_in(clock, "swift", "ms-swift")


if __name__ == "__main__":
    main(task(sys.argv[1:]))
