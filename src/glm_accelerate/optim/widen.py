"""Layers that float16 cannot hold, found by looking at them once in a type with more range, and moved there.

enter unit -> cast to its type -> ... -> leave the last one -> cast back.  A unit is a layer with its residual
sum: what grows in one and passes through the next is measured in both. For any module.
"""

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from glm_accelerate.runtime.device import device_of

LARGEST = torch.finfo(torch.float16).max
LEAST = torch.finfo(torch.float16).smallest_normal / 2**10  # the smallest number that is not zero
ROOM = 4.0  # as much may magnitudes still grow


@dataclass(frozen=True, slots=True)
class Extremes:
    """What was measured in a unit: the largest number, the largest gradient of the loss, and the share of
    gradients that float16 would lose at the loss scale.
    """

    value: float
    gradient: float
    lost: float

    @property
    def fits(self) -> bool:
        """False for NaN, too. Gradients fit if they do at some loss scale."""
        return ROOM * self.value <= LARGEST and ROOM * self.gradient <= LARGEST


def wide_dtype(device: torch.device) -> torch.dtype:
    """Where layers are moved: bfloat16 on a GPU that multiplies it in hardware, else float32."""
    record = device_of(device)
    fast = record.streams and record.bfloat16()
    return torch.bfloat16 if fast else torch.float32


class Gauge:
    """Follows the extremes of one unit on its device: nothing is read while it runs."""

    def __init__(self, scale: float) -> None:
        self.least = LEAST / scale
        self.seen: Tensor | None = None  # largest number, largest gradient, gradients, those lost

    def watch(self, _: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """A forward hook."""
        for tensor in (*inputs[:1], output):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self._add(tensor, 0)
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: self._add(gradient, 1))

    def _add(self, tensor: Tensor, slot: int) -> None:
        sizes = tensor.detach().abs()
        if self.seen is None:
            self.seen = torch.zeros(4, dtype=torch.float64, device=tensor.device)
        if tensor.numel():
            self.seen[slot] = torch.maximum(self.seen[slot], sizes.amax().double())
        if slot:
            self.seen[2] += (sizes > 0).sum()
            self.seen[3] += ((sizes > 0) & (sizes < self.least)).sum()

    def numbers(self) -> list[float]:
        """To be put together over ranks: two maxima, two sums."""
        return [0.0] * 4 if self.seen is None else self.seen.tolist()


def extremes(ranks: Iterable[list[float]]) -> Extremes:
    """The extremes of one unit, from the numbers of every rank."""
    value, gradient, count, lost = zip(*ranks, strict=True)
    largest = [torch.tensor(each).max().item() for each in (value, gradient)]  # NaN stays NaN
    return Extremes(largest[0], largest[1], sum(lost) / max(1.0, sum(count)))


class Mixed:
    """Units of a model that compute in `narrow`, but for those that were moved to `wide`: at first, all.
    `last`: what comes after the last of them, if it is here; other processes may have other units.
    """

    def __init__(
        self,
        units: Mapping[str, nn.Module],
        last: nn.Module | None,
        *,
        narrow: torch.dtype,
        wide: torch.dtype,
    ) -> None:
        self.units, self.narrow, self.wide = dict(units), narrow, wide
        self.moved: frozenset[str] | None = None  # None: all
        for name, unit in units.items():
            unit.register_forward_pre_hook(partial(self._enter, name))
        if last is not None:
            last.register_forward_hook(self._leave)

    def move(self, names: Iterable[str]) -> None:
        """These compute in `wide` from here on, all others in `narrow`."""
        self.moved = frozenset(names)

    def dtype(self, *names: str) -> torch.dtype:
        """In which these units compute; `narrow` if any of them does."""
        return self.wide if self.moved is None or self.moved.issuperset(names) else self.narrow

    @contextmanager
    def measured(self, scale: float) -> Generator[dict[str, Gauge], None, None]:
        """All units are wide and watched: every input and output of every module within them."""
        gauges = {name: Gauge(scale) for name in self.units}
        hooks = [
            part.register_forward_hook(gauges[name].watch)
            for name, unit in self.units.items()
            for part in unit.modules()
        ]
        before, self.moved = self.moved, None
        try:
            yield gauges
        finally:
            self.moved = before
            for hook in hooks:
                hook.remove()

    def _enter(self, name: str, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        dtype = self.dtype(name)
        return tuple(
            each.to(dtype) if isinstance(each, Tensor) and each.is_floating_point() else each
            for each in inputs
        )

    def _leave(self, _: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        return output.to(self.narrow)
