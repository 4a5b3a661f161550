"""The order of samples: every prefix a fair sample of all, and always the same one. Looks and verdicts."""

from itertools import pairwise

import numpy as np
import pytest

from glm_accelerate.evaluate.statistics.samples import draw_order, level_of, looks, verdict


def drawn(seed: int, count: int = 2000, sources: int = 4):
    draw = np.random.default_rng(seed)
    lengths = draw.lognormal(5, 1, count).astype(np.int64)
    return lengths, np.minimum(draw.geometric(0.5, count), sources) - 1


def apart(strata) -> float:
    """How many samples a stratum has, in any prefix, more or fewer than its share of it."""
    shown = np.eye(strata.max() + 1)[strata].cumsum(0)
    return float(abs(shown - np.arange(1, len(strata) + 1)[:, None] * shown[-1] / len(strata)).max())


@pytest.mark.parametrize("seed", range(5))
def test_every_prefix_has_of_each_stratum_its_share(seed):
    choice = draw_order(*drawn(seed), seed)
    assert sorted(choice.order) == list(range(2000))
    assert 8 <= choice.strata.max() + 1 <= 24
    assert apart(choice.strata) < 1.5


def test_strata_are_sources_and_within_one_from_short_to_long():
    lengths, sources = drawn(0)
    choice = draw_order(lengths, sources, 0)
    strata = np.empty(2000, dtype=np.int64)
    strata[choice.order] = choice.strata
    of = [(sources[strata == one], lengths[strata == one]) for one in range(strata.max() + 1)]
    assert all(len(set(own)) == 1 for own, _ in of)
    for (source, shorter), (next_source, longer) in pairwise(of):
        assert source[0] < next_source[0] or shorter.max() < longer.min()


def test_the_seed_decides_and_nothing_else():
    lengths, sources = drawn(1)
    one, same, other = (draw_order(lengths, sources, seed).order for seed in (7, 7, 8))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


def test_every_sample_has_the_same_chance_to_be_among_the_first():
    lengths, sources = drawn(2, count=60, sources=3)
    times = np.zeros(60)
    for seed in range(1500):
        times[draw_order(lengths, sources, seed).order[:20]] += 1
    assert abs(times / 1500 - 1 / 3).max() < 4.5 * np.sqrt(2 / 9 / 1500)


@pytest.mark.parametrize(
    ("lengths", "sources"),
    [([5], [0]), ([3, 3, 3, 3], [0, 0, 0, 0]), ([1, 2, 3], [9, 4, 7]), ([9] * 99 + [1], [0] * 99 + [1])],
)
def test_odd_sets(lengths, sources):
    choice = draw_order(np.array(lengths), np.array(sources), 0)
    assert sorted(choice.order) == list(range(len(lengths)))
    assert sorted(set(choice.strata.tolist())) == list(range(len(set(sources))))


def test_a_million_samples_are_ordered_well_within_a_test():
    draw = np.random.default_rng(0)
    choice = draw_order(draw.integers(1, 4096, 10**6), draw.integers(0, 50, 10**6), 0)
    assert np.array_equal(np.sort(choice.order), np.arange(10**6))


@pytest.mark.parametrize(
    "expected",
    [
        (128, 403, 1270, 4000),
        (128, 299, 700),
        (128, 256, 512, 1024),
        (255,),
        (128, 256),
        (60,),
        (1,),
        (128, 2540, 50397, 10**6),
    ],
)
def test_looks_are_few_and_far_apart(expected):
    assert looks(expected[-1]) == expected
    assert sum([level_of(expected)] * len(expected)) == pytest.approx(0.05)


def test_for_any_size_each_look_at_least_doubles():
    for total in range(1, 3000):
        found = looks(total)
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
