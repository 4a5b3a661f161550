"""What both sides of the race are told and what they have to hand back: one JSON file each way.

A side is a process of its own. It reads a Job, trains, and writes a Result; it never judges itself.
"""

import resource
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Side = str  # "stock", "ours", or the name of a peer
Method = Literal["lora", "full"]

LEARNING_RATES: dict[Method, float] = {"lora": 5e-4, "full": 5e-5}  # as shipped in lora.yaml and sft.yaml


@dataclass(frozen=True)
class Job:
    """One training run. `train` holds the samples of every step in the order of training (for stock);
    `data` is the file that they were read from (for ours, which makes its own order from the same seed)."""

    model: str
    data: str
    train: str
    cache: str
    export: str
    method: Method
    batch: int
    steps: int
    max_tokens: int
    seed: int
    threads: int
    compile: bool = True  # ours: its operators, if there is a C++ compiler

    @property
    def learning_rate(self) -> float:
        return LEARNING_RATES[self.method]


@dataclass(frozen=True)
class Result:
    """What one side measured. One entry a step in the lists; bytes in the memory figures."""

    side: Side
    wall_seconds: list[float]
    cpu_seconds: list[float]
    tokens: list[int]  # unpadded
    targets: list[int]
    computed: list[int]  # positions computed, padding included
    memory_before: int  # everything imported, nothing loaded
    memory_loaded: int
    memory_peak: int  # high-water mark from the start of the process to the last step
    trainable: int
    versions: dict[str, str]


@dataclass
class Meter:
    """Two clocks, read at the end of every step. A step's time is all that passed since the one before:
    loading, collating, forward, backward, update and whatever the loop does besides."""

    wall: list[float] = field(default_factory=list[float])
    cpu: list[float] = field(default_factory=list[float])

    def read(self) -> None:
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())

    def wall_seconds(self) -> list[float]:
        return [b - a for a, b in zip(self.wall, self.wall[1:], strict=False)]

    def cpu_seconds(self) -> list[float]:
        return [b - a for a, b in zip(self.cpu, self.cpu[1:], strict=False)]


def memory_now() -> int:
    """Resident bytes of this process."""
    return _status("VmRSS")


def memory_peak() -> int:
    """The most that was ever resident. Not ru_maxrss where that can be helped: it survives exec, so a
    child would start with its parent's peak."""
    return _status("VmHWM")


def _status(name: str) -> int:
    status = Path("/proc/self/status")
    if not status.exists():  # not Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for line in status.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{status} has no {name}")
