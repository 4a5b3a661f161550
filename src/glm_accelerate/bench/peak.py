"""The floating-point operations a second of a device, of which a step's share is its FLOP utilisation."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from glm_accelerate.plan.hardware import known
from glm_accelerate.runtime.device import device_of

SIDE, CPU_SIDE = 8192, 2048  # of the square product that stands for the device's best
SECONDS = 1.0  # for which it is repeated


@dataclass(frozen=True, slots=True)
class Peak:
    """Floating-point operations a second of a device."""

    measured: float
    dtype: str
    data_sheet: float | None  # in bfloat16, where the device is known


def peak(device: torch.device, compute: str, seconds: float = SECONDS) -> Peak:
    """Measured by the largest product that training could hope for: the best of a second of them."""
    dtype = torch.float32 if compute == "float32" else torch.bfloat16  # fp8 too is judged by bfloat16
    on_cpu = device.type == "cpu"
    side = CPU_SIDE if on_cpu else SIDE
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    best, ends = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < ends:
        best = min(best, seconds_of(lambda: torch.mm(left, right), 1 if on_cpu else 4, device))
    name = "" if on_cpu else device_of(device).name()
    return Peak(2 * side**3 / best, str(dtype).removeprefix("torch."), data_sheet(name))


def data_sheet(name: str) -> float | None:
    """The maker's figure for a device, by its driver's name."""
    sheet = known(name)
    return sheet.products if sheet is not None and sheet.bf16 else None


def seconds_of(work: Callable[[], object], times: int, device: torch.device, warm: bool = False) -> float:
    """The mean of so many calls; `warm`: after one more, which may compile."""
    if warm:
        work()
    began = device_of(device).clock()
    for _ in range(times):
        work()
    return (device_of(device).clock() - began) / times
