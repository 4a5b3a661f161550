"""After how many samples to look whether they are enough, how wide an interval must be then, and its verdict.

Who looks at a 95 % interval again and again is wrong far more often than once in 20 times. So the looks are
declared beforehand, and each gets its share of the 5 %.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from glm_accelerate.evaluate.statistics.intervals import Interval

Verdict = Literal["better", "worse", "tied", "undecided"]

MOST_LOOKS = 4


def looks(total: int, most: int | None, count: int = MOST_LOOKS, first: int = 128) -> tuple[int, ...]:
    """Numbers of samples, the last one `most` or all. Each is at least twice the one before: a look that adds
    little is not worth its share.
    """
    last = total if most is None else min(total, most)
    assert last > 0
    assert 0 < count <= MOST_LOOKS
    count = min(count, max(1, (last // first).bit_length()))
    return (*(round(number) for number in np.geomspace(first, last, count)[:-1]), last)


def level_of(looks: Sequence[int], family: float = 0.05) -> float:
    """How often the interval of one look may be wrong, so that all together are at most `family`."""
    return family / len(looks)


def verdict(interval: Interval, margin: float) -> Verdict:
    """Of the difference of two losses, new less old; differences up to the margin don't matter."""
    low, high = interval
    if -margin <= low and high <= margin:
        return "tied"
    return "better" if high < -margin else "worse" if low > margin else "undecided"
