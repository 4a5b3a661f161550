"""Decisions depend on what was found at which step, and never on when the results came."""

import math
from collections.abc import Mapping, Sequence
from itertools import permutations, product

import numpy as np
import pytest

from benchmarks.evaluation.simulate import PROMISED, ours, run_of
from glm_accelerate.evaluate.protocol.history import EvaluationHistory, score_step
from glm_accelerate.evaluate.protocol.messages import Comparison, EvaluationResult
from glm_accelerate.evaluate.statistics.decide import (
    ScoredStep,
    best,
    comparable,
    finalists,
    stopped_at,
    times_lowered,
)


def settled(asked: Sequence[int], results: Mapping[int, EvaluationResult]) -> list[ScoredStep]:
    """As the trainer does it: a result is in after the one that it was compared with."""
    scored: dict[int, ScoredStep] = {}
    for step in sorted(results):
        scored[step] = score_step(results[step], scored)
    return EvaluationHistory(list(asked), scored).prefix


def done(
    step: int, loss: float | None, *, samples: int = 9, against: Comparison | None = None
) -> EvaluationResult:
    return EvaluationResult(step, "plan", 0, "done", loss, samples=samples, total=9, against=against)


def compared(step: int, difference: float, verdict: str) -> Comparison:
    return Comparison(step, f"{step}-plan-0", difference, (0.0, 0.0), verdict, 1, 4)  # type: ignore[arg-type]


def line(*losses: float | None) -> list[ScoredStep]:
    """Steps 10, 20, ...; None: one that failed."""
    return [
        ScoredStep(10 * number, loss, "failed" if loss is None else "done")
        for number, loss in enumerate(losses, 1)
    ]


def decisions(prefix: list[ScoredStep]) -> tuple[object, ...]:
    return (
        best(prefix, 0.01),
        stopped_at(prefix, 2, 0.01),
        times_lowered(prefix, 1, 0.01),
        finalists(prefix, 0.01),
    )


RESULTS = {
    10: done(10, 3.0),
    20: done(20, 2.0),
    30: EvaluationResult(30, "plan", 0, "timeout", reason="slow"),
    40: done(40, 2.5),
    50: done(50, math.nan),
    60: done(60, 2.1),
    70: done(70, 1.0),
}


def test_the_order_of_arrival_changes_nothing():
    """All 5,040 orders: what is known at any time is a prefix of what will be, and what was decided stays."""
    steps = sorted(RESULTS)
    whole = settled(steps, RESULTS)
    after = {count: decisions(whole[:count]) for count in range(len(steps) + 1)}
    for order in permutations(steps):
        arrived: dict[int, EvaluationResult] = {}
        for step in order:
            arrived[step] = RESULTS[step]
            prefix = settled(steps, arrived)
            assert prefix == whole[: len(prefix)]
            assert decisions(prefix) == after[len(prefix)]
        assert prefix == whole


def test_a_missing_result_holds_back_all_later_ones():
    assert [
        one.step for one in settled([40, 10, 20, 30], {10: RESULTS[10], 20: RESULTS[20], 40: RESULTS[40]})
    ] == [
        10,
        20,
    ]
    assert settled([10], {20: RESULTS[20]}) == []


def test_once_decided_more_results_never_change_it():
    for losses in product([1.0, 1.005, 1.02, 2.0, None], repeat=5):
        prefixes = [line(*losses[:count]) for count in range(6)]
        stops = [stopped_at(prefix, 2, 0.01) for prefix in prefixes]
        first = next((stop for stop in stops if stop is not None), None)
        assert all(stop in (None, first) for stop in stops)
        assert stops == sorted(stops, key=lambda stop: stop is not None)
        times = [times_lowered(prefix, 2, 0.01) for prefix in prefixes]
        assert times == sorted(times)


def test_whatever_a_later_step_can_be_compared_with_is_known():
    """The best up to a step that is still to come: whichever that is, and whatever is found until then."""
    for losses in product([1.0, 1.02, 2.0, None], repeat=5):
        prefix = line(*losses)
        for until in (0, 10, 25, 30, 50, 60):
            bests = {
                best([one for one in prefix if one.step <= step], 0.01) for step in range(until, 61, 5)
            } - {None}
            assert set(comparable(prefix, 0.01, until)) == bests
            for known in range(6):  # what was found later takes nothing away
                assert bests & {one.step for one in prefix[:known]} <= set(
                    comparable(prefix[:known], 0.01, until)
                )


@pytest.mark.parametrize("loss", [None, math.nan, math.inf, -math.inf])
def test_what_has_no_finite_loss_is_never_best_and_costs_no_patience(loss):
    results = {
        10: done(10, 2.0),
        20: done(20, loss),
        30: done(30, loss),
        40: done(40, 3.0),
        50: done(50, 1.0),
    }
    prefix = settled(sorted(results), results)
    assert [one.loss for one in prefix] == [2.0, None, None, 3.0, 1.0]
    assert best(prefix[:4], 0.0) == 10
    assert best(prefix, 0.0) == 50
    assert stopped_at(prefix, 2, 0.0) is None
    assert times_lowered(prefix, 2, 0.0) == 0
    assert finalists(prefix, 0.0) == [50, 10, 40]


@pytest.mark.parametrize("status", ["failed", "timeout", "skipped"])
def test_what_was_not_evaluated_does_not_count_even_with_a_loss(status):
    results = {10: done(10, 2.0), 20: EvaluationResult(20, "plan", 0, status, 1.0), 30: done(30, 2.5)}
    prefix = settled([10, 20, 30], results)
    assert prefix[1] == ScoredStep(20, None, status)
    assert best(prefix, 0.0) == 10
    assert stopped_at(prefix, 1, 0.0) == 30


def test_nothing_was_found():
    for prefix in ([], line(None, None)):
        assert best(prefix, 0.0) is None
        assert stopped_at(prefix, 1, 0.0) is None
        assert times_lowered(prefix, 1, 0.0) == 0
        assert finalists(prefix, 0.0) == []


def test_as_good_as_equal_the_earlier_is_best():
    assert best(line(2.0, 2.0, 2.0), 0.0) == 10
    assert best(line(2.0, 1.999, 1.9985), 0.002) == 10
    assert best(line(2.0, 1.999, 1.9979), 0.002) == 30  # small gains add up
    assert best(line(2.0, 1.999), 0.0) == 20


def test_what_was_compared_is_as_it_was_said():
    """Only where no sample that may be had tells the two apart, the lower figure does."""
    first = done(10, 2.0, samples=4)
    for verdict, winner in (("better", 20), ("undecided", 20), ("tied", 10), ("worse", 10)):
        second = done(20, 1.7, samples=4, against=compared(10, -0.01, verdict))
        assert best(settled([10, 20], {10: first, 20: second}), 0.002) == winner
    near = done(20, 1.7, samples=4, against=compared(10, -0.001, "undecided"))
    assert best(settled([10, 20], {10: first, 20: near}), 0.002) == 10


def test_losses_of_different_samples_are_brought_on_one_scale():
    """Step 30 looks better than 20 only because its sample was easier."""
    results = {
        10: done(10, 2.0, samples=4),
        20: done(20, 2.3, samples=8, against=compared(10, -0.2, "better")),
        30: done(30, 1.9, samples=4, against=compared(10, -0.1, "better")),
        40: done(40, 1.75, samples=9, against=compared(20, -0.05, "better")),  # all samples: exact as it is
    }
    prefix = settled(sorted(results), results)
    assert [one.loss for one in prefix] == pytest.approx([2.0, 1.8, 1.9, 1.75])
    assert best(prefix[:3], 0.002) == 20
    assert best(prefix, 0.002) == 40


def test_stopping_waits_for_evaluations_without_gain_in_a_row():
    prefix = line(3.0, 2.0, 2.5, 1.5, 1.6, None, 1.7, 1.8, 1.0)
    assert stopped_at(prefix, 1, 0.0) == 30
    assert stopped_at(prefix, 2, 0.0) == 70
    assert stopped_at(prefix, 3, 0.0) == 80
    assert stopped_at(prefix, 4, 0.0) is None
    assert stopped_at(line(3.0, 2.999, 2.998), 2, 0.01) == 30


def test_the_rate_is_lowered_again_only_after_as_much_patience():
    assert [times_lowered(line(*[1.0] * count), 2, 0.0) for count in range(1, 8)] == [0, 0, 1, 1, 2, 2, 3]
    assert times_lowered(line(1.0, 1.0, 0.5, 0.5, 0.5, 0.4), 2, 0.0) == 1


def test_finalists_are_the_best_and_the_lowest():
    assert finalists(line(5.0, 4.0, 3.0, 4.0, 3.5), 0.0) == [30, 50, 20]
    assert finalists(line(2.0, 1.999, None, 1.9985, 2.1), 0.002) == [10, 40, 20]
    assert finalists(line(2.0), 0.0) == [10]


def test_a_run_decided_on_samples_has_the_best_step_of_all_samples_for_less():
    draw = np.random.default_rng(0)
    old = PROMISED["long tails"](draw, 2000)
    choice = old.choice(0)
    losses = run_of(draw, old, [2.0, 1.8, 1.7, 1.6, 1.62, 1.6005, 1.7, 1.9], 0.05)[:, choice.order]
    outcome = ours(losses, old.targets_N[choice.order], choice.strata, (128, 512, 2000), 0.002, crown=True)
    assert outcome.chosen == 3
    assert outcome.wrong == 0
    assert outcome.cost < 0.75
