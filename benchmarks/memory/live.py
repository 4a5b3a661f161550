"""Memory of a process step by step: bytes alive (live.c counts them in front of malloc), pages resident."""

import ctypes
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.race.job import memory_now, memory_peak
from glm_accelerate.runtime.host import reset_peak_resident

SOURCE = Path(__file__).with_name("live.c")
CPU = torch.device("cpu")


def build_counter(folder: Path) -> Path:
    """The library that counts. It has to be in LD_PRELOAD when a process starts."""
    library = folder / "live.so"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE)], check=True)
    return library


@dataclass
class Course:
    """One entry a step, in bytes."""

    live: list[int] = field(default_factory=list[int])  # the most that was alive at once within the step
    high: list[int] = field(default_factory=list[int])  # ... that was resident
    resident: list[int] = field(default_factory=list[int])  # at its end

    def begin(self) -> None:
        """Before the first step."""
        _live_peak()
        reset_peak_resident()

    def step(self) -> None:
        """After a step."""
        self.live.append(_live_peak())
        self.high.append(memory_peak())
        self.resident.append(memory_now())
        reset_peak_resident()


def live_now() -> int:
    """Bytes alive."""
    return _counter("live_bytes")


def _live_peak() -> int:
    return _counter("live_peak")


def _counter(name: str) -> int:
    function = getattr(ctypes.CDLL(None), name)  # AttributeError: the process was started without live.c
    function.restype = ctypes.c_long
    return function()
