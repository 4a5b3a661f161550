"""Which held-out samples are evaluated, the same ones in a whole run: their order, and how many of them.

Whoever looks at a 95 % interval again and again is wrong far more often than once in 20 times. So the looks,
after which an evaluation may stop, are declared beforehand, and each gets its share of the 5 %.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from glm_accelerate.evaluate.statistics.intervals import Interval

Verdict = Literal["better", "worse", "tied", "undecided"]

MOST_LOOKS, FIRST_LOOK = 4, 128
CLASSES = 16  # strata in all, about; each source has at least one


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The first n of `order` are the sample of size n. It has each stratum's share, to about one sample."""

    order: NDArray[np.int64]  # of all samples
    strata: NDArray[np.int64]  # stratum of each sample of `order`; neighbours in number are alike


def draw_order(lengths: NDArray[np.integer], sources: NDArray[np.integer], seed: int) -> SampleOrder:
    """Strata are a source's samples of similar length. Each is shuffled, then spread evenly over the order
    from a random start, so that every sample has the same chance to be among the first n.
    """
    assert len(lengths) == len(sources) > 0
    strata = _strata(lengths, sources)
    sizes = np.bincount(strata)
    draw = np.random.Generator(np.random.PCG64([seed, 3 << 32]))
    shuffled = draw.permutation(len(strata))
    grouped = shuffled[np.argsort(strata[shuffled], kind="stable")]
    firsts = np.repeat(np.cumsum(sizes) - sizes, sizes)
    starts = np.repeat(draw.random(len(sizes)), sizes)
    due = (np.arange(len(strata)) - firsts + starts) / np.repeat(sizes, sizes)
    order = grouped[np.argsort(due, kind="stable")].astype(np.int64)
    return SampleOrder(order, strata[order])


def looks(most: int) -> tuple[int, ...]:
    """Numbers of samples after which to look, the last one `most`. Each is at least twice the one before: a
    look that adds little is not worth its share.
    """
    count = min(MOST_LOOKS, max(1, (most // FIRST_LOOK).bit_length()))
    return (*(round(number) for number in np.geomspace(FIRST_LOOK, most, count)[:-1]), most)


def level_of(looks: Sequence[int]) -> float:
    """How often the interval of one look may be wrong, so that all together are at most 5 %."""
    return 0.05 / len(looks)


def verdict(interval: Interval, margin: float) -> Verdict:
    """On an interval of the new loss less the old one; differences up to the margin don't matter."""
    low, high = interval
    if -margin <= low and high <= margin:
        return "tied"
    return "better" if high < -margin else "worse" if low > margin else "undecided"


def _strata(lengths: NDArray[np.integer], sources: NDArray[np.integer]) -> NDArray[np.int64]:
    """The stratum of each sample, numbered without gaps: source by source, within one from short to long. A
    source is cut at quantiles of its lengths, into more classes the more samples it has.
    """
    strata = np.zeros(len(lengths), dtype=np.int64)
    _, source_of, counts = np.unique(sources, return_inverse=True, return_counts=True)
    members = np.split(np.argsort(source_of, kind="stable"), np.cumsum(counts)[:-1])
    first = 0
    for own in members:
        classes = max(1, round(CLASSES * len(own) / len(lengths)))
        edges = np.quantile(lengths[own], np.arange(1, classes) / classes)
        _, within = np.unique(np.searchsorted(edges, lengths[own], side="right"), return_inverse=True)
        strata[own] = first + within
        first += int(within.max()) + 1
    return strata
