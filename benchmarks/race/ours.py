"""Our way: the run that `glm-accelerate train` builds from a config, with a clock as its observer.

python -m benchmarks.race.ours JOB RESULT
"""

import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.race.job import Job, Meter, Result, memory_now, memory_peak, read_job, write_json
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.models.adapt.files import save_adapter
from glm_accelerate.models.write import save_model
from glm_accelerate.train.stop import StopRequest


def config_of(job: Job, dev: Path | None = None) -> RunConfig:
    """What a user would write to train as stock does; all that is not said here is our default."""
    data = {"train": job.data, "max_tokens": job.max_tokens, "cache": job.cache}
    said: dict[str, Any] = {
        "model": {"path": job.model},
        "adapt": {"method": job.method},
        "data": data | ({"dev": str(dev)} if dev else {}),
        "train": {"steps": job.steps, "step_samples": job.batch, "seed": job.seed},
        "optim": {"learning_rate": job.learning_rate, "schedule": "linear", "warmup": 0.0},
        "checkpoint": {"every": job.steps},  # stock saves nothing; ours saves once, after the last step
    }
    if job.method == "lora":
        said["adapt"] |= {"rank": 8, "alpha": 32.0, "dropout": 0.1, "targets": ["q_proj", "k_proj", "v_proj"]}
    return RunConfig.model_validate(said)
