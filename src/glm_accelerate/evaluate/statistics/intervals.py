"""Estimates for all held-out samples from a few, each with the interval in which the exact figure lies.

Samples are drawn without replacement (`samples.py`): of all samples an interval has no width, and the
estimate is the plain mean to the last bit. Nothing is claimed of other text, so windows of one document need
no care. Shape suffixes: N samples evaluated, the first of the order; K groups of strata.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from glm_accelerate.runtime.errors import UserError

FEWEST = 8  # samples drawn in a stratum; one with fewer is merged with its neighbour
ANGLES = np.linspace(0, math.pi / 2, 4097)

Floats = NDArray[np.float64]
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class SampleLosses:
    """The losses of the first N samples of an exam's order. A sample without targets has 0 of both."""

    losses_N: NDArray[np.float64]  # summed over a sample's targets
    targets_N: NDArray[np.float64]

    @staticmethod
    def of(losses: Sequence[float], targets: Sequence[float]) -> "SampleLosses":
        return SampleLosses(np.array(losses, np.float64), np.array(targets, np.float64))

    def followed_by(self, more: "SampleLosses") -> "SampleLosses":
        """These losses and those of the samples that follow."""
        return SampleLosses(
            np.concatenate([self.losses_N, more.losses_N]), np.concatenate([self.targets_N, more.targets_N])
        )


def loss_interval(
    losses: SampleLosses, strata_of_all: NDArray[np.int64], total: int, level: float = 0.05
) -> tuple[float, Interval | None]:
    """Loss per target. There is no interval from a single sample, nor from several that are all alike. Losses
    are skewed, and a small sample shows too little of it: the correction is doubled.
    """
    loss, interval = _ratio(losses.losses_N, losses.targets_N, strata_of_all, total, level, skew=2.0)
    alike = interval is not None and interval[0] == interval[1] and len(losses.losses_N) < total
    return loss, None if alike else interval


def paired(
    new: SampleLosses, old: SampleLosses, strata_of_all: NDArray[np.int64], total: int, level: float = 0.05
) -> tuple[float, Interval | None]:
    """How much higher the loss of `new` is, on the samples that both have. How hard a sample is cancels out,
    so the difference is known far better than either loss. There is no interval from a single sample. A
    strong change of one sample in a hundred can be missed by the first hundred.
    """
    count = min(len(new.losses_N), len(old.losses_N))
    targets_N = new.targets_N[:count]
    assert np.array_equal(targets_N, old.targets_N[:count])
    differences_N = new.losses_N[:count] - old.losses_N[:count]
    return _ratio(differences_N, targets_N, strata_of_all, total, level, skew=0.0)


def mean_interval(
    values_N: Floats, strata_of_all: NDArray[np.int64], total: int, level: float = 0.05, scale: float = 1.0
) -> tuple[float, Interval | None]:
    """The mean of a metric; NaN marks a sample that has none. Values lie between 0 and `scale` unless some
    are seen outside. Values not seen in the sample may be as frequent in all as `rate_interval` allows.
    """
    has_N = ~np.isnan(values_N)
    values = np.where(has_N, values_N, 0.0)
    mean, interval = _ratio(values, has_N.astype(np.float64), strata_of_all, total, level, skew=2.0)
    if interval is None:
        return mean, None
    lowest, highest = min(0.0, float(values.min())), max(scale, float(values.max()))
    cases = int(has_N.sum())
    _, unseen = rate_interval(0, cases, cases + total - len(values_N), level)
    low = min(interval[0], mean - unseen * (mean - lowest))
    high = max(interval[1], mean + unseen * (highest - mean))
    return mean, (max(low, lowest), min(high, highest))


def rate_interval(right: int, count: int, total: int, level: float = 0.05) -> Interval:
    """The share of right answers among `total` samples, when `right` of `count` drawn without replacement are
    right: all shares at which neither so many nor so few would be surprising. Exact, so never too short.
    """
    assert 0 <= right <= count <= total
    assert count > 0

    def fewest(right: int) -> int:
        """How many of all are right at the least."""
        low, high = right, total - count + right
        while low < high:
            middle = (low + high) // 2
            low, high = (
                (low, middle) if _at_least(right, count, middle, total) > level / 2 else (middle + 1, high)
            )
        return low

    return fewest(right) / total, (total - fewest(count - right)) / total


def _ratio(
    sums_N: Floats, targets_N: Floats, strata_of_all: NDArray[np.int64], total: int, level: float, skew: float
) -> tuple[float, Interval | None]:
    """The ratio of sums to targets over all samples. Each stratum is weighted by its number of samples; the
    residual is a sample's sum less the ratio times its targets (Cochran, Sampling Techniques, 6.11), and
    Student's t has Satterthwaite's degrees of freedom. `skew`: how much of the correction for skew to apply.
    """
    count = len(sums_N)
    assert len(strata_of_all) == total >= count
    if not np.isfinite(sums_N).all():
        raise UserError("the held-out loss is not finite")
    if not targets_N.any():
        raise UserError("no held-out sample has a target", cure="see what `data CONFIG` says was dropped")
    group_of_all = _grouped(strata_of_all, count)
    group_N, all_K = group_of_all[:count], np.bincount(group_of_all).astype(np.float64)
    drawn_K = np.bincount(group_N)
    weights_N = (all_K / drawn_K)[group_N]
    # math.fsum rounds once, so that the order of samples changes no bit.
    targets = math.fsum(weights_N * targets_N)
    ratio = math.fsum(weights_N * sums_N) / targets
    if count == total:
        return ratio, (ratio, ratio)
    if np.count_nonzero(targets_N) < 2:
        return ratio, None
    residuals_N = sums_N - ratio * targets_N
    residuals_N -= (np.bincount(group_N, residuals_N) / drawn_K)[group_N]
    squares_K = np.bincount(group_N, residuals_N**2) / (drawn_K - 1)
    scales_K = all_K**2 * (1 - drawn_K / all_K) / drawn_K
    variance = float(scales_K @ squares_K)
    if not variance:
        return ratio, (ratio, ratio)
    # The variance's own uncertainty: as with normal residuals, or more where the sample's tails are long.
    fourths_K = np.bincount(group_N, residuals_N**4) / drawn_K
    uncertainty_K = np.maximum(2 * squares_K**2 / (drawn_K - 1), (fourths_K - squares_K**2) / drawn_K)
    reach = _student(level, 2 * variance**2 / float(scales_K**2 @ uncertainty_K))
    longer = skew * _skew_shift(residuals_N, group_N, all_K, drawn_K, reach) / variance**1.5
    half = math.sqrt(variance) / targets
    return ratio, (ratio - half * (reach + max(0.0, -longer)), ratio + half * (reach + max(0.0, longer)))


def _skew_shift(
    residuals_N: Floats,
    group_N: NDArray[np.int64],
    all_K: Floats,
    drawn_K: NDArray[np.int64],
    reach: float,
) -> float:
    """How much farther the interval reaches up than down, in deviations (times their cube): Johnson's
    modified t (1978), with the third cumulants of a mean and of its variance without replacement.
    """
    skews_K = np.bincount(group_N, residuals_N**3) * drawn_K / ((drawn_K - 1) * np.maximum(1, drawn_K - 2))
    shares_K = drawn_K / all_K
    each_K = all_K**3 * skews_K * (1 - shares_K) / drawn_K**2
    of_mean = float((each_K * (1 - 2 * shares_K)).sum())
    with_variance = float((each_K * (1 - shares_K)).sum())
    square = (3 * with_variance - of_mean) / 6
    return with_variance / 2 - square + square * reach**2


def _grouped(strata_of_all: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The group of each sample: strata with fewer than FEWEST samples drawn are merged with the next."""
    drawn = np.bincount(strata_of_all[:count], minlength=int(strata_of_all.max()) + 1)
    group_of = np.zeros(len(drawn), dtype=np.int64)
    group, size = 0, 0
    for stratum, number in enumerate(drawn.tolist()):
        if size >= FEWEST:
            group, size = group + 1, 0
        group_of[stratum] = group
        size += number
    if size < FEWEST:  # the last has no neighbour after it
        group_of[group_of == group] = max(0, group - 1)
    return group_of[strata_of_all]


def _student(level: float, freedom: float) -> float:
    """The quantile of Student's t with `level` outside, on both sides together."""
    if freedom > 200:  # Cornish and Fisher
        z = -NormalDist().inv_cdf(level / 2)
        return z + (z**3 + z) / (4 * freedom)
    # t = sqrt(freedom) tan(angle), and the angle's density is a power of its cosine.
    density = np.cos(ANGLES) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(float(np.interp(1 - level, below / below[-1], ANGLES)))


def _at_least(right: int, count: int, all_right: int, total: int) -> float:
    """The probability to draw at least `right` right ones when `all_right` of all are. C: counts above it."""
    wrong = total - all_right
    if right <= max(0, count - wrong):
        return 1.0

    def ways(of: int, chosen: int) -> float:
        return math.lgamma(of + 1) - math.lgamma(chosen + 1) - math.lgamma(of - chosen + 1)

    first = ways(all_right, right) + ways(wrong, count - right) - ways(total, count)
    have_C = np.arange(right, min(count, all_right), dtype=np.float64)
    steps_C = (all_right - have_C) * (count - have_C) / ((have_C + 1) * (wrong - count + have_C + 1))
    return math.exp(first) + float(np.exp(first + np.cumsum(np.log(steps_C))).sum())
