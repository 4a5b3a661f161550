"""Which samples make up step k: a pure function of the seed, the epoch and the step's size.

So the data part of a resume is one integer, and any number of ranks sees the same samples in a step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glm_accelerate.runtime.errors import UserError

_MOST_COUNTED = 1000  # epochs
_MOST_DRAWN = 1 << 28  # 2 GiB of sample numbers, and as much again to shuffle them


@dataclass(frozen=True, slots=True)
class Order:
    """A step has `step_samples` samples or as many as fill `step_tokens`; an epoch's last may be smaller."""

    lengths: NDArray[np.int32]
    spans: Sequence[tuple[int, int, float]]  # first sample, one past the last, weight
    seed: int
    step_samples: int | None = None
    step_tokens: int | None = None

    def __post_init__(self) -> None:
        assert (self.step_samples is None) != (self.step_tokens is None)
        drawn = sum((stop - start) * weight for start, stop, weight in self.spans)
        if drawn > max(_MOST_DRAWN, 4 * len(self.lengths)):
            what = f"the weights of data.train make an epoch of {drawn:.3g} samples"
            cure = "lower them: train.epochs or train.steps says how long a run takes"
            raise UserError(what, cure=cure)

    def epoch(self, epoch: int) -> list[NDArray[np.int64]]:
        """Sample numbers of every step of an epoch."""
        drawn = np.concatenate([self._drawn(index, epoch) for index in range(len(self.spans))])
        drawn = np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(drawn)
        if self.step_samples is not None:
            return [
                drawn[start : start + self.step_samples] for start in range(0, len(drawn), self.step_samples)
            ]
        assert self.step_tokens is not None
        return _cut_by_tokens(drawn, self.lengths[drawn], self.step_tokens)

    def steps_from(self, position: int) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
        """(number, epoch, sample numbers) of each step after the first `position` ones, without end."""
        epoch, before = 0, 0
        while True:
            steps = self.epoch(epoch)
            for index in range(max(0, position - before), len(steps)):
                yield before + index + 1, epoch, steps[index]
            before += len(steps)
            epoch += 1

    def steps_in(self, epochs: float) -> int:
        """The number of steps of so many epochs; steps of tokens are counted in the first ones."""
        whole = int(epochs)
        counted = min(whole, _MOST_COUNTED if self.step_tokens else 1)
        steps = sum(len(self.epoch(epoch)) for epoch in range(counted)) * whole // max(1, counted)
        return max(1, steps + round((epochs - whole) * len(self.epoch(whole))))

    def _drawn(self, index: int, epoch: int) -> NDArray[np.int64]:
        """One source's samples of an epoch: whole copies, and a share that moves on from epoch to epoch."""
        start, stop, weight = self.spans[index]
        every = np.arange(start, stop, dtype=np.int64)
        share = round((weight - int(weight)) * len(every))
        share = share or int(0 < len(every) * weight < 1)  # an epoch without a single sample would never end
        if not share:
            return np.tile(every, int(weight))
        shuffled = np.random.Generator(np.random.PCG64([self.seed, 1 << 32, index])).permutation(every)
        moving = shuffled[(np.arange(share) + epoch * share) % len(every)]
        return np.concatenate([np.tile(every, int(weight)), moving])


def _cut_by_tokens(
    drawn: NDArray[np.int64], lengths: NDArray[np.int32], step_tokens: int
) -> list[NDArray[np.int64]]:
    """Each step takes samples until the next would not fit; a longer one is a step by itself."""
    total = np.cumsum(lengths, dtype=np.int64)
    steps: list[NDArray[np.int64]] = []
    start = 0
    while start < len(drawn):
        done = int(total[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(total, done + step_tokens, side="right")))
        steps.append(drawn[start:stop])
        start = stop
    return steps
