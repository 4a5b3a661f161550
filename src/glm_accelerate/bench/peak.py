"""How many floating-point operations a second a device can do: what a step reaches of it is the model's FLOP
utilisation.
"""

import time
from dataclasses import dataclass

import torch

from glm_accelerate.plan.devices import known

SIDES = {"cuda": 8192, "cpu": 2048}  # of the square product that stands for the device's best
SECONDS = 1.0  # for which it is repeated


@dataclass(frozen=True, slots=True)
class Peak:
    """Products a second of a device."""

    measured: float
    dtype: str
    data_sheet: float | None  # of its maker, in bfloat16, where its name is known


def peak(device: torch.device, compute: str, seconds: float = SECONDS) -> Peak:
    """Measured by the largest product that training could hope for: the best of a second of them."""
    dtype = torch.float32 if compute == "float32" else torch.bfloat16  # fp8 too is judged by bfloat16
    side = SIDES[device.type]
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    best, ends = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < ends:
        best = min(best, _seconds(left, right, 4 if device.type == "cuda" else 1))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return Peak(2 * side**3 / best, str(dtype).removeprefix("torch."), data_sheet(name))


def data_sheet(name: str) -> float | None:
    """Of a device as its driver names it."""
    found = known(name)
    return found.products if found is not None and found.bf16 else None


def _seconds(left: torch.Tensor, right: torch.Tensor, times: int) -> float:
    on_gpu = left.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        torch.mm(left, right)
    if on_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / times
