"""Our way: `train` on the config that a user would write, with a clock as one more observer.

python -m benchmarks.race.ours JOB RESULT
"""

import gc
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.child import read, write
from benchmarks.race.job import Job, Meter, Result, memory_now, memory_peak
from benchmarks.race.samples import read_samples
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.pack import ARRANGE
from glm_accelerate.kernels.compiled import missing
from glm_accelerate.models.adapter_files import save_adapter
from glm_accelerate.models.write import save_model
from glm_accelerate.observe.events import Event
from glm_accelerate.training.build import Built
from glm_accelerate.training.run import train


def config_of(job: Job, dev: Path | None = None) -> RunConfig:
    """What a user would write to train as stock does; all that is not said here is our default."""
    data = {"train": job.data, "max_tokens": job.max_tokens, "cache": job.cache}
    config: dict[str, Any] = {
        "model": {"path": job.model},
        "adapt": {"method": job.method},
        "data": data | ({"dev": str(dev)} if dev else {}),
        "train": {"steps": job.steps, "step_samples": job.batch, "seed": job.seed},
        "precision": {"compile": "on" if job.compile and missing("cpu") is None else "off"},
        "optim": {"learning_rate": job.learning_rate, "schedule": "linear", "warmup": 0.0},
        "checkpoint": {"every": job.steps},  # stock saves nothing; ours saves once, after the last step
    }
    if job.method == "lora":
        config["adapt"] |= {
            "rank": 8,
            "alpha": 32.0,
            "dropout": 0.1,
            "targets": ["q_proj", "k_proj", "v_proj"],
        }
    return RunConfig.model_validate(config)


class Clock:
    """Reads the meter when training starts and after each step, and counts what was trained."""

    def __init__(self) -> None:
        self.meter = Meter()
        self.steps: list[Event] = []
        self.memory_peak = 0

    def observe(self, event: Event) -> None:
        if event["kind"] not in ("start", "step"):
            return
        self.meter.read()
        # Our loop sets the high-water mark back at each step, so it is read at each.
        self.memory_peak = max(self.memory_peak, memory_peak())
        if event["kind"] == "step":
            self.steps.append(event)

    def close(self) -> None:
        pass

    def counted(self, name: str) -> list[int]:
        return [int(str(event[name])) for event in self.steps]


def computed(job: Job, batching: str, micro_tokens: int) -> list[int]:
    """Positions of every step, padding included, as the pipeline lays them out."""
    lengths = [len(sample.tokens) for sample in read_samples(Path(job.train))]
    starts = range(0, job.steps * job.batch, job.batch)
    layouts = [ARRANGE[batching](lengths[start : start + job.batch], micro_tokens) for start in starts]
    return [sum(arrangement.area for arrangement in layout) for layout in layouts]


def main(job_file: Path, result_file: Path) -> None:
    job = read(job_file, Job)
    torch.set_num_threads(job.threads)
    export = Path(job.export)
    clock = Clock()
    kept: list[Built] = []
    loaded: list[int] = []

    def on_built(ready: Built) -> None:
        gc.collect()
        loaded.append(memory_now())
        kept.append(ready)

    before = memory_now()
    train(config_of(job), export / "run", observers=[clock], on_built=on_built)

    run = kept[0].run
    result = Result(
        side="ours",
        wall_seconds=clock.meter.wall_seconds(),
        cpu_seconds=clock.meter.cpu_seconds(),
        tokens=clock.counted("tokens"),
        targets=clock.counted("targets"),
        computed=computed(job, run.config.data.batching, run.plan.micro_tokens),
        memory_before=before,
        memory_loaded=loaded[0],
        memory_peak=clock.memory_peak,
        trainable=sum(p.numel() for p in run.model.parameters() if p.requires_grad),
        versions={"torch": torch.__version__},
    )
    if job.method == "lora":
        save_adapter(run.model, export)
    else:
        save_model(run.model, export)
    write(result_file, result)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
