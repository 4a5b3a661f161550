"""Sums of gradients over ranks, in buckets that travel while backward passes still run.

What a bucket holds, and in which order buckets are sent, follows from the parameters' order and sizes alone:
all ranks agree, whichever gradients each has first; a resumed run adds in the order of an undisturbed one.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import inf

import torch
from torch import Tensor
from torch.distributed import Work
from torch.distributed.tensor import DTensor

from glm_accelerate.memory.weights import BUCKET, BUCKETS
from glm_accelerate.parallel.part import local_of
from glm_accelerate.parallel.place import SAMPLES, Place
from glm_accelerate.parallel.table import Axis, CutTable


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are summed together. `early`: each is whole once all passes have added to it, and no
    pass sends anything else among the same ranks.
    """

    weights: tuple[Tensor, ...]
    axes: Axis
    early: bool


class GradientSums:
    """Sums a step's gradients in place, each over the ranks along its axes. FSDP has summed its own over data
    and shard. While passes run nothing waits: what cannot be sent yet is sent after a later gradient.
    """

    def __init__(self, table: CutTable) -> None:
        self._place = table.place
        self._buckets = list(_buckets(table))
        self._missing: list[float] = []  # of each bucket, how many gradients passes are yet to make
        self._sent = 0
        self._under_way: deque[_Sum] = deque()
        for number, bucket in enumerate(self._buckets):
            self._place.meet_to_add(*bucket.axes)
            for weight in bucket.weights if bucket.early else ():
                weight.register_post_accumulate_grad_hook(partial(self._made, number))

    def begin(self, passes: int) -> None:
        """Before so many backward passes."""
        self._missing = [passes * len(each.weights) if each.early else inf for each in self._buckets]

    def finish(self) -> None:
        """After them: all gradients are summed."""
        self._go_on(wait=True)
        self._missing, self._sent = [], 0

    def _made(self, number: int, _: Tensor) -> None:
        if self._missing:  # else this is a rehearsal
            self._missing[number] -= 1
            assert self._missing[number] >= 0, "a gradient was added to after it was summed"
            self._go_on(wait=False)

    def _go_on(self, wait: bool) -> None:
        """Send and take in what there is, in order."""
        while self._under_way or self._sent < len(self._buckets):
            ready = self._sent < len(self._buckets) and (wait or not self._missing[self._sent])
            if ready and len(self._under_way) < BUCKETS:
                self._under_way.append(_Sum(self._buckets[self._sent], self._place))
                self._sent += 1
            elif self._under_way and self._under_way[0].arrived(wait):
                self._under_way.popleft()
            else:
                return


class _Sum:
    """Of one bucket, under way. A rank that learnt nothing adds zeros; one gradient alone is summed where it
    is.
    """

    def __init__(self, bucket: Bucket, place: Place) -> None:
        for weight in bucket.weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        found = [local_of(weight.grad) for weight in bucket.weights if weight.grad is not None]
        self._in_place = len(found) == 1 and found[0].is_contiguous()
        self._gradients = found
        self._flat = found[0].view(-1) if self._in_place else torch.cat([each.flatten() for each in found])
        self._messages = place.add_up(self._flat, *bucket.axes)
        self._message: Work | None = next(self._messages)

    def arrived(self, wait: bool) -> bool:
        """Whether the gradients are summed now."""
        while self._message is not None:
            if not wait and not self._message.is_completed():
                return False
            self._message.wait()
            self._message = next(self._messages, None)
        if not self._in_place:
            parts = self._flat.split([each.numel() for each in self._gradients])
            for gradient, part in zip(self._gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        return True


def _buckets(table: CutTable) -> Iterator[Bucket]:
    """Neighbours in the order in which a backward pass makes gradients; after them what has to wait for all
    passes. With several ranks a gradient has its parameter's dtype (`Linear.learn_in`).
    """
    found: dict[tuple[bool, Axis, torch.dtype], list[Tensor]] = {}
    for name, weight in reversed(list(table.weights.items())):
        cut = table.cut(name)
        axes = cut.partial + (() if isinstance(weight, DTensor) else SAMPLES)
        if table.place.count(*axes) > 1:
            late = axes != SAMPLES or not cut.settled
            found.setdefault((late, axes, weight.dtype), []).append(weight)
    for (late, axes, _), weights in sorted(found.items(), key=lambda item: item[0][:2]):
        bucket: list[Tensor] = []
        for weight in weights:
            if bucket and sum(each.nbytes for each in bucket) + weight.nbytes > BUCKET:
                yield Bucket(tuple(bucket), axes, not late)
                bucket = []
            bucket.append(weight)
        yield Bucket(tuple(bucket), axes, not late)
