"""Looks, their levels, verdicts, and the sentence that says what a sample is enough for."""

from itertools import pairwise

import pytest

from glm_accelerate.evaluate.looks import level_of, looks, said, verdict
from glm_accelerate.evaluate.results import Comparison, Result


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


COMPARED = Comparison(800, "800-9f3a-1", -0.021, (-0.034, -0.008), "better", 3, 4)


def test_a_sample_says_what_it_is_enough_for():
    words = said(
        Result(900, "9f3a", 1, "done", 2.114, (2.08, 2.15), samples=700, total=4000, against=COMPARED)
    )
    assert words == (
        "step 900: 700 of 4,000 samples (plan 9f3a, look 3 of 4): loss 2.1140 (95 %: 2.0800 to 2.1500); "
        "against step 800 -0.0210 (95 % over all looks: -0.0340 to -0.0080): better; "
        "enough to choose between the two, not enough for a figure to publish (evaluate all samples for that)"
    )


def test_all_samples_are_enough_and_nothing_is_claimed_beyond_them():
    words = said(Result(900, "9f3a", 1, "done", 2.1, (2.1, 2.1), samples=4000, total=4000, against=COMPARED))
    assert words.endswith(
        "better; enough to choose between the two, exact for these samples, not for other text"
    )
    assert "95 %" not in words


@pytest.mark.parametrize(
    ("found", "words"),
    [("tied", "enough to take the two as equal"), ("undecided", "not enough to choose between the two")],
)
def test_what_cannot_be_told_is_said(found, words):
    compared = Comparison(8, "8-p-1", 0.0, (-0.1, 0.1), found, 1, 1)
    assert words in said(Result(9, "p", 1, "done", 2.1, (2.0, 2.2), samples=7, total=40, against=compared))


def test_the_first_and_the_failed():
    alone = said(Result(0, "p", 1, "done", 2.1, None, samples=1, total=40))
    assert alone == (
        "step 0: 1 of 40 samples (plan p): loss 2.1000; "
        "not enough for a figure to publish (evaluate all samples for that)"
    )
    assert (
        said(Result(9, "p", 1, "timeout", reason="no result in 60 s"))
        == "step 9: timeout (no result in 60 s)"
    )
    asked = said(Result(9, "p", 1, "done", answers=40, total=40, metrics={"bleu": 0.5}))
    assert asked == "step 9: 40 of 40 samples (plan p); exact for these samples, not for other text"
    assert said(Result(9, "p", 1, "skipped")) == "step 9: skipped"
