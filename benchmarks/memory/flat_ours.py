"""Ours, for the picture of memory over many steps: `train`, with one more observer.

python -m benchmarks.memory.flat_ours JOB RESULT
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.child import read
from benchmarks.memory.live import Course, live_now
from benchmarks.race.job import Job
from benchmarks.race.ours import config_of
from glm_accelerate.observe.events import Event
from glm_accelerate.training.run import train


class Scale:
    """Weighs the process when training starts and after each step."""

    def __init__(self) -> None:
        self.course = Course()
        self.loaded = 0
        self.said: list[str] = []

    def observe(self, event: Event) -> None:
        if event["kind"] == "start":
            self.loaded = live_now()
            self.course.begin()
        elif event["kind"] == "step":
            self.course.step()
        elif event["kind"] == "decision":
            self.said.append(str(event["said"]))

    def close(self) -> None:
        pass


def main(job_file: Path, result_file: Path) -> None:
    job = read(job_file, Job)
    torch.set_num_threads(job.threads)
    scale = Scale()
    train(config_of(job), Path(job.export) / "run", observers=[scale])
    others = {"loaded": scale.loaded, "said": scale.said, "versions": {"torch": torch.__version__}}
    result_file.write_text(json.dumps(asdict(scale.course) | others) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
