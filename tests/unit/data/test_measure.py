"""Figures from lengths alone, against figures worked out by hand."""

from itertools import pairwise

import numpy as np
import pytest

from glm_accelerate.data.measure import LengthBar, histogram, percentiles, useful_shares


def test_percentiles_are_lengths_that_occur() -> None:
    found = dict(percentiles(np.arange(1, 101, dtype=np.int32)))
    assert found[5] == 5
    assert found[50] == 50
    assert found[100] == 100
    assert dict(percentiles(np.array([7], np.int32)))[50] == 7


def test_histogram_counts_every_sample_once() -> None:
    lengths = np.array([1, 63, 64, 500, 1000, 1000], np.int32)
    bars = histogram(lengths)
    assert sum(bar.samples for bar in bars) == 6
    assert bars[0] == LengthBar(1, 64, 3)
    assert bars[1] == LengthBar(65, 128, 0)
    assert bars[-1].first <= 1000 <= bars[-1].last
    assert len(bars) <= 16


@pytest.mark.parametrize("longest", [1, 16, 17, 500, 1024, 1025, 130_000])
def test_histogram_has_few_bars_at_any_length(longest: int) -> None:
    bars = histogram(np.array([1, longest], np.int32))
    assert len(bars) <= 16
    assert sum(bar.samples for bar in bars) == 2
    assert all(bar.last + 1 == after.first for bar, after in pairwise(bars))


def test_equal_lengths_waste_nothing() -> None:
    shares = useful_shares(np.full(64, 128, np.int32), step_samples=4, micro_tokens=512)
    assert {useful.way for useful in shares} == {
        "pad, batch 1", "pad, batch 4", "pad, batch 16", "bucket", "pack",
    }  # fmt: skip
    assert all(useful.share == 1.0 for useful in shares)


def test_padding_wastes_what_the_longest_adds() -> None:
    # One batch of all four: 4 x 100 positions for 130 tokens. In one packed row: 130, rounded to 192.
    lengths = np.array([10, 10, 10, 100], np.int32)
    shares = {useful.way: useful.share for useful in useful_shares(lengths, 4, 1024)}
    assert shares["pad, batch 1"] == 1.0
    assert shares["pad, batch 4"] == pytest.approx(130 / 400)
    assert shares["pack"] == pytest.approx(130 / 192)


def test_long_tails_are_where_packing_gains() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1, 2_000).clip(16, 2048).astype(np.int32)
    shares = {useful.way: useful.share for useful in useful_shares(lengths, 16, 4096)}
    assert shares["pad, batch 16"] < shares["pad, batch 4"] < 0.7
    assert shares["pack"] > 0.9
