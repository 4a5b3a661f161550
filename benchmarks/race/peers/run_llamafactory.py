"""LLaMA-Factory: `run_exp` on what would stand in the YAML of `llamafactory-cli train`.

python -m benchmarks.race.peers.run_llamafactory JOB RESULT [setting=JSON ...]
"""
# pyright: basic, reportMissingImports=false

import json
import shutil
import sys
from typing import Any

import torch
import transformers.models.glm4.modeling_glm4  # noqa: F401  (loaded late otherwise, and counted as its memory)
from llamafactory.train.tuner import run_exp

from benchmarks.race.peers.clock import Task, task

ROLES = {"user": "user", "assistant": "assistant", "observation": "observation", "system": "system"}


def name_data(given: Task) -> None:
    """The directory of data sets as its README describes it, with one of them."""
    given.scratch.mkdir(parents=True)
    shutil.copy(given.job.data, given.scratch / "race.jsonl")
    tags = {
        "role_tag": "role",
        "content_tag": "content",
        **{f"{role}_tag": name for role, name in ROLES.items()},
    }
    entry = {
        "file_name": "race.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": tags,
    }
    (given.scratch / "dataset_info.json").write_text(json.dumps({"race": entry}))


def settings(given: Task) -> dict[str, Any]:
    job = given.job
    options: dict[str, Any] = {
        "model_name_or_path": job.model,
        "stage": "sft",
        "do_train": True,
        "finetuning_type": job.method,
        "dataset": "race",
        "dataset_dir": str(given.scratch),
        "template": "glm4",
        "cutoff_len": job.max_tokens,
        "max_steps": job.steps,
        "learning_rate": job.learning_rate,
        "lr_scheduler_type": "linear",
        "bf16": True,
        # For speed.
        "packing": True,  # rows of cutoff_len; one of them holds about four samples
        "neat_packing": True,  # and they don't see each other
        "per_device_train_batch_size": 1,
        "disable_gradient_checkpointing": True,
        "dataloader_pin_memory": False,
        # What the measurement needs.
        "disable_shuffling": True,
        "overwrite_cache": True,
        "use_cpu": True,
        "seed": job.seed,
        "output_dir": str(given.scratch / "out"),
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    if job.method == "lora":
        options |= {
            "lora_rank": 8,
            "lora_alpha": 32,
            "lora_dropout": 0.1,
            "lora_target": "q_proj,k_proj,v_proj",
        }
    return options | given.settings


def main(given: Task) -> None:
    torch.set_num_threads(given.job.threads)
    name_data(given)
    clock = given.clock()
    run_exp(settings(given), callbacks=[clock])
    given.hand_in(clock, "llamafactory", "llamafactory")


if __name__ == "__main__":
    main(task(sys.argv[1:]))
