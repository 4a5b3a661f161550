"""Intervals against simulation and exact arithmetic: they cover, and all samples leave no doubt."""

import math
from fractions import Fraction

import numpy as np
import pytest

from benchmarks.evaluation.simulate import PROMISED, covered, covered_paired, first, fooled
from glm_accelerate.evaluate.statistics.intervals import (
    SampleLosses,
    _student,
    loss_interval,
    mean_interval,
    paired,
    rate_interval,
)
from glm_accelerate.evaluate.statistics.samples import level_of
from glm_accelerate.runtime.errors import UserError

SETS = 200  # of each kind; the study in docs/why/evaluation.md took 2,000


def population(name: str, total: int, seed: int = 0):
    return PROMISED[name](np.random.default_rng(seed), total)


def test_nineteen_of_twenty_intervals_hold_the_loss_of_all():
    found = [covered(make, SETS, 128, 1000)[0] for make in PROMISED.values()]
    assert np.mean(found) >= 0.94
    assert min(found) >= 0.9  # what 200 sets can tell


def test_nineteen_of_twenty_intervals_hold_the_difference_of_two_steps():
    found = [covered_paired(make, SETS, 128, 1000)[0] for make in PROMISED.values()]
    assert np.mean(found) >= 0.94
    assert min(found) >= 0.9


def test_four_looks_at_equal_steps_seldom_call_the_new_one_better():
    looks, some = (64, 128, 256, 512), SETS // 2
    found = [fooled(make, some, looks, 1000, level_of(looks))[0] for make in PROMISED.values()]
    assert np.mean(found) <= 0.05
    careless = fooled(PROMISED["mild"], some, looks, 1000, 0.05)
    assert careless[1] > 0.1  # the same data do fool who gives every look the whole 5 %


@pytest.mark.parametrize("name", PROMISED)
def test_all_samples_are_the_full_evaluation_to_the_last_bit(name):
    whole = population(name, 777)
    in_file_order = math.fsum(whole.losses_N) / math.fsum(whole.targets_N)
    for seed in range(5):
        items, strata = whole.drawn(seed)
        loss, interval = loss_interval(items, strata, 777)
        assert loss == in_file_order
        assert interval == (loss, loss)
        assert paired(items, items, strata, 777) == (0.0, (0.0, 0.0))


def test_an_interval_shrinks_with_the_sample_and_pairs_make_it_far_shorter():
    whole = population("long tails", 4000)
    items, strata = whole.drawn(0)
    draw = np.random.default_rng(1)
    other = SampleLosses(items.losses_N * draw.normal(0.99, 0.02, 4000), items.targets_N)
    widths = []
    for count in (128, 512, 2048, 3999):
        _, interval = loss_interval(first(items, count), strata, 4000)
        assert interval is not None
        _, difference = paired(first(other, count), items, strata, 4000)
        widths.append(interval[1] - interval[0])
        assert difference is not None
        assert difference[1] - difference[0] < widths[-1] / 5
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < widths[0] / 50


def test_the_difference_is_of_the_samples_that_both_have():
    items, strata = population("mild", 500).drawn(0)
    more = SampleLosses(items.losses_N + 0.25 * items.targets_N, items.targets_N)
    difference, interval = paired(first(more, 300), first(items, 200), strata, 500)
    assert difference == pytest.approx(0.25)
    assert interval == pytest.approx((0.25, 0.25))


def test_strata_correct_a_lopsided_sample():
    """A stratum that the prefix has too little of still counts as much as it has samples."""
    strata = np.array([0] * 20 + [1] * 10 + [1] * 70)
    losses = np.where(strata == 0, 1.0, 5.0)
    items = SampleLosses(losses[:30], np.ones(30))
    assert loss_interval(items, strata, 100)[0] == pytest.approx(0.2 * 1 + 0.8 * 5)


def test_small_strata_are_taken_together():
    """Every sample a stratum of its own: nearly as if there were none."""
    items, _ = population("mild", 100).drawn(0)
    each = np.random.default_rng(0).permutation(100)
    own = loss_interval(first(items, 40), each, 100)
    none = loss_interval(first(items, 40), np.zeros(100, dtype=np.int64), 100)
    assert own[1] is not None
    assert none[1] is not None
    assert own[0] == pytest.approx(none[0], rel=0.1)
    assert own[1][1] - own[1][0] == pytest.approx(none[1][1] - none[1][0], rel=0.5)


def test_too_little_tells_no_interval_and_says_so():
    strata = np.zeros(9, dtype=np.int64)
    one, none = (
        SampleLosses(np.array([2.0, 0.0]), np.array([1.0, 0.0])),
        SampleLosses(np.zeros(3), np.zeros(3)),
    )
    assert loss_interval(one, strata, 9) == (2.0, None)
    assert paired(one, one, strata, 9) == (0.0, None)
    alike = SampleLosses(np.full(3, 2.5), np.ones(3))
    assert loss_interval(alike, strata, 9) == (2.5, None)  # three times the same is not all there is
    assert loss_interval(alike, strata[:3], 3) == (2.5, (2.5, 2.5))
    with pytest.raises(UserError, match="no held-out sample has a target"):
        loss_interval(none, strata, 9)
    for bad in (math.nan, math.inf):
        broken = SampleLosses(np.array([1.0, bad]), np.ones(2))
        with pytest.raises(UserError, match="not finite"):
            loss_interval(broken, strata, 9)


# --- Shares. ---


def exact(right: int, count: int, total: int, level: Fraction) -> tuple[float, float]:
    """By trying every number of right ones, in whole numbers."""

    def ways(all_right: int, numbers: range) -> int:
        return sum(math.comb(all_right, k) * math.comb(total - all_right, count - k) for k in numbers)

    least = level / 2 * math.comb(total, count)
    fits = [
        all_right
        for all_right in range(right, total - count + right + 1)
        if ways(all_right, range(right, count + 1)) > least and ways(all_right, range(right + 1)) > least
    ]
    return fits[0] / total, fits[-1] / total


def test_shares_are_exact():
    draw = np.random.default_rng(0)
    for _ in range(60):
        total = int(draw.integers(1, 120))
        count = int(draw.integers(1, total + 1))
        right = int(draw.integers(0, count + 1))
        assert rate_interval(right, count, total) == exact(right, count, total, Fraction(1, 20))


def test_shares_of_millions():
    low, high = rate_interval(2500, 5000, 10**6)
    assert 0.486 < low < 0.4862
    assert low + high == pytest.approx(1)
    assert rate_interval(0, 5000, 10**6)[1] == pytest.approx(-math.log(0.025) / 5000, rel=0.01)
    assert rate_interval(10, 5000, 10**6)[0] > 0.0009


def test_all_samples_leave_no_doubt_about_a_share():
    assert all(rate_interval(right, 20, 20) == (right / 20, right / 20) for right in range(21))


# --- Means of metrics. ---


def test_means_cover_also_where_most_values_are_alike():
    draw = np.random.default_rng(0)
    strata = np.zeros(600, dtype=np.int64)
    for share in (0.003, 0.05, 0.5):
        hits = 0
        for _ in range(150):
            values = np.where(draw.random(600) < share, draw.beta(2, 2, 600), 0.0)
            _, interval = mean_interval(values[:100], strata, 600)
            assert interval is not None
            assert 0 <= interval[0] <= interval[1] <= 1
            hits += interval[0] <= values.mean() <= interval[1]
        assert hits >= 0.93 * 150


def test_samples_without_a_value_are_left_out():
    draw = np.random.default_rng(1)
    values, strata = draw.random(400), np.zeros(400, dtype=np.int64)
    values[draw.random(400) < 0.5] = np.nan
    mean, interval = mean_interval(values, strata, 400)
    assert interval == (mean, mean)
    assert mean == pytest.approx(np.nanmean(values), rel=1e-12)
    _, interval = mean_interval(values[:100], strata, 400)
    assert interval is not None
    assert interval[0] < np.nanmean(values) < interval[1]
    assert mean_interval(np.array([0.5, np.nan]), strata, 400) == (0.5, None)


def test_a_metric_that_is_no_share_is_not_cut_at_one():
    values, strata = np.linspace(0, 40, 50), np.zeros(500, dtype=np.int64)
    mean, interval = mean_interval(values, strata, 500)
    assert interval is not None
    assert mean == pytest.approx(20)
    assert 10 < interval[0] < mean < interval[1] < 30


def test_what_was_not_seen_yet_is_as_large_as_the_scale():
    """Rouge goes to 100: of twenty answers that all have 0 one in six others may still have all of it."""
    nothing, strata = np.zeros(20), np.zeros(1000, dtype=np.int64)
    share, rouge = (mean_interval(nothing, strata, 1000, scale=scale)[1] for scale in (1.0, 100.0))
    assert share is not None
    assert 0.1 < share[1] < 0.2
    assert rouge == (0.0, pytest.approx(100 * share[1]))


def test_a_mean_and_its_interval_are_of_one_estimate():
    """Of a stratum that the sample has too little of each counts for more."""
    strata = np.array([0] * 20 + [1] * 10 + [1] * 70)
    values = np.where(strata[:30] == 0, 0.1, 0.9)
    mean, interval = mean_interval(values, strata, 100)
    assert mean == pytest.approx(0.2 * 0.1 + 0.8 * 0.9)
    assert interval is not None
    assert interval[0] <= mean <= interval[1]


@pytest.mark.parametrize(
    ("freedom", "table"), [(1, 12.7062), (2, 4.30265), (5, 2.57058), (30, 2.04227), (1000, 1.96234)]
)
def test_students_t_is_as_in_tables(freedom, table):
    assert _student(0.05, freedom) == pytest.approx(table, rel=1e-5)
