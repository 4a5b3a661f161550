"""What can be measured before training: the lengths, what each batching wastes, what two sets share.

useful share = tokens / positions computed. The most that a faster way of batching can gain is 1 / share.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glm_accelerate.data.pack import aligned, bucket, pack
from glm_accelerate.data.store import Store
from glm_accelerate.data.types import DOCUMENT_ALIGNMENT

PERCENTILES = (5, 25, 50, 75, 95, 99, 100)
PADDED_BATCHES = (1, 4, 16)
_MOST_STEPS = 500  # enough for a share that is shown in whole percents
_MOST_BARS = 16

Lengths = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LengthBar:
    """How many samples have at least `first` and at most `last` tokens."""

    first: int
    last: int
    samples: int


@dataclass(frozen=True, slots=True)
class Useful:
    """The share of computed positions that are tokens, for one way of batching."""

    way: str
    share: float


def percentiles(lengths: Lengths) -> tuple[tuple[int, int], ...]:
    """(percent, length) pairs: so many percent of the samples are not longer."""
    values = np.percentile(lengths, PERCENTILES, method="inverted_cdf")
    return tuple((percent, int(value)) for percent, value in zip(PERCENTILES, values, strict=True))


def histogram(lengths: Lengths) -> tuple[LengthBar, ...]:
    """At most 16 bars of equal width, a multiple of 64 tokens where that is possible."""
    longest = int(lengths.max())
    width = -(-longest // _MOST_BARS)
    if width > DOCUMENT_ALIGNMENT // 2:
        width = aligned(width)
    counts = np.bincount((lengths - 1) // width)
    return tuple(LengthBar(i * width + 1, (i + 1) * width, int(count)) for i, count in enumerate(counts))


def useful_shares(
    lengths: Lengths, step_samples: int, micro_tokens: int, seed: int = 0
) -> tuple[Useful, ...]:
    """Every way of batching, measured on the same steps of a shuffled epoch: all, or the first 500."""
    order = np.random.default_rng(seed).permutation(lengths)
    drawn: Lengths = order[: _MOST_STEPS * step_samples]
    steps = [step.tolist() for step in _cut(drawn, step_samples)]
    tokens = int(drawn.sum())
    padded = [
        Useful(
            f"pad, batch {batch}", tokens / sum(len(rows) * int(rows.max()) for rows in _cut(drawn, batch))
        )
        for batch in PADDED_BATCHES
    ]
    arranged = [
        Useful(way, tokens / sum(one.area for step in steps for one in arrange(step, micro_tokens)))
        for way, arrange in (("bucket", bucket), ("pack", pack))
    ]
    return (*padded, *arranged)


def shared(train: Store, dev: Store) -> list[tuple[int, int]]:
    """(dev, train) numbers of samples with the same content; for each dev sample the first such one."""
    seen, first = np.unique(np.concatenate([part.contents for part in train.parts]), return_index=True)
    asked = np.concatenate([part.contents for part in dev.parts])
    at = np.searchsorted(seen, asked).clip(max=len(seen) - 1)
    both = np.flatnonzero(seen[at] == asked)
    return list(zip(both.tolist(), first[at[both]].tolist(), strict=True))


def _cut(lengths: Lengths, size: int) -> Iterator[Lengths]:
    return (lengths[start : start + size] for start in range(0, len(lengths), size))
