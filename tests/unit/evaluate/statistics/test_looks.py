"""Looks, their levels, and verdicts."""

from itertools import pairwise

import pytest

from glm_accelerate.evaluate.statistics.looks import level_of, looks, verdict


@pytest.mark.parametrize(
    ("total", "most", "found"),
    [
        (4000, None, (128, 403, 1270, 4000)),
        (4000, 700, (128, 299, 700)),
        (1024, None, (128, 256, 512, 1024)),
        (255, None, (255,)),
        (256, 9999, (128, 256)),
        (60, None, (60,)),
        (1, None, (1,)),
        (4000, 20, (20,)),
        (10**6, None, (128, 2540, 50397, 10**6)),
    ],
)
def test_looks_are_few_and_far_apart(total, most, found):
    assert looks(total, most) == found
    assert sum([level_of(found)] * len(found)) == pytest.approx(0.05)


def test_for_any_size_each_look_at_least_doubles():
    for total in range(1, 3000):
        found = looks(total, None)
        assert found[-1] == total
        assert len(found) <= 4
        assert all(after >= 2 * before - 1 for before, after in pairwise(found))


@pytest.mark.parametrize(
    ("interval", "margin", "found"),
    [
        ((-0.034, -0.008), 0.002, "better"),
        ((0.008, 0.034), 0.002, "worse"),
        ((-0.001, 0.002), 0.002, "tied"),
        ((-0.0015, -0.0005), 0.002, "tied"),
        ((-0.03, -0.001), 0.002, "undecided"),
        ((-0.03, 0.03), 0.002, "undecided"),
        ((-0.002, -0.002), 0.002, "tied"),
        ((-0.0021, -0.0021), 0.002, "better"),
        ((0.0, 0.0), 0.0, "tied"),
        ((1e-12, 1e-12), 0.0, "worse"),
    ],
)
def test_verdicts(interval, margin, found):
    assert verdict(interval, margin) == found


def test_all_samples_always_decide():
    for thousandths in range(-5, 6):
        exact = thousandths / 1000
        assert verdict((exact, exact), 0.002) != "undecided"
