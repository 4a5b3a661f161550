"""Axolotl: `axolotl train CONFIG --launcher python`, with a plug-in that adds the clock.

python -m benchmarks.race.peers.run_axolotl JOB RESULT [setting=JSON ...]
"""
# pyright: basic, reportMissingImports=false

import sys
from pathlib import Path
from typing import Any

import torch
import transformers.models.glm4.modeling_glm4  # noqa: F401  (loaded late otherwise, and counted as its memory)
import yaml
from axolotl.cli.main import cli
from axolotl.core.builders import HFCausalTrainerBuilder  # noqa: F401  (the same)
from axolotl.integrations.base import BasePlugin

from benchmarks.race.peers.clock import Clock, Task, task

TEMPLATE = Path(__file__).with_name("glm4_training.jinja")


class Clocked(BasePlugin):
    """What `plugins` in the config names."""

    clock: Clock

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Clock]:
        return [self.clock]

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        return {"use_cpu": True}  # the config has no word for it, and without it bf16 is refused


def settings(given: Task) -> dict[str, Any]:
    job = given.job
    options: dict[str, Any] = {
        "base_model": job.model,
        "datasets": [
            {
                "path": job.data,
                "ds_type": "json",
                "type": "chat_template",
                "field_messages": "messages",
                "roles_to_train": ["assistant"],
                "roles": {name: [name] for name in ("system", "user", "assistant", "observation")},
            }
        ],
        "chat_template": "jinja",
        "chat_template_jinja": TEMPLATE.read_text(encoding="utf-8"),
        "eot_tokens": ["<|user|>", "<|observation|>"],
        "train_on_eot": "turn",
        "dataset_prepared_path": str(given.scratch / "prepared"),
        "dataset_num_proc": 1,
        "val_set_size": 0.0,
        "sequence_len": job.max_tokens,
        "max_steps": job.steps,
        "num_epochs": 100,  # the steps above are what counts
        "learning_rate": job.learning_rate,
        "lr_scheduler": "linear",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "optimizer": "adamw_torch_fused",
        "bf16": True,
        # For speed.
        "sample_packing": True,  # rows of sequence_len; one of them holds about four samples
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
        "attn_implementation": "sdpa",
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        # What the measurement needs.
        "shuffle_merged_datasets": False,
        "seed": job.seed,
        "output_dir": str(given.scratch / "out"),
        "save_strategy": "no",
        "plugins": [f"{__name__}.{Clocked.__name__}"],
    }
    if job.method == "lora":
        options |= {
            "adapter": "lora",
            "lora_r": 8,
            "lora_alpha": 32,
            "lora_dropout": 0.1,
            "lora_target_modules": ["q_proj", "k_proj", "v_proj"],
        }
    return options | given.settings


def main(given: Task) -> None:
    torch.set_num_threads(given.job.threads)
    given.scratch.mkdir(parents=True)
    config = given.scratch / "axolotl.yaml"
    config.write_text(yaml.safe_dump(settings(given)))
    Clocked.clock = given.clock()
    cli(["train", str(config), "--launcher", "python"], standalone_mode=False)
    given.hand_in(Clocked.clock, "axolotl", "axolotl")


if __name__ == "__main__":
    main(task(sys.argv[1:]))
