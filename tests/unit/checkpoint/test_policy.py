"""A decision follows from figures alone, says why, and keeps its bounds whatever they are."""

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from glm_accelerate.checkpoint.policy import (
    GUESS,
    Adaptive,
    Fixed,
    Measured,
    between_failures,
    costs,
    decide,
    interval,
)

MEASURED = Measured(
    step=100, since_save=0.0, step_seconds=2.0, state_bytes=10**9, blocked_seconds=1.0, write_seconds=20.0
)


def draws(number: int, seed: int) -> list[tuple[Adaptive, Measured]]:
    draw = random.Random(seed)

    def size(low: float, high: float) -> float:
        return math.exp(draw.uniform(math.log(low), math.log(high)))

    made: list[tuple[Adaptive, Measured]] = []
    for _ in range(number):
        blocked = size(1e-3, 300) if draw.random() < 0.8 else None
        measured = Measured(
            step=draw.randrange(10**6),
            since_save=size(1e-2, 1e5),
            step_seconds=size(1e-2, 100),
            state_bytes=int(size(1e6, 1e12)),
            blocked_seconds=blocked,
            write_seconds=None if blocked is None or draw.random() < 0.2 else blocked * size(1, 100),
            failures=draw.choice([0, 0, 1, 5, 100]),
            wall_seconds=size(1, 1e7),
        )
        declared = size(60, 1e7) if draw.random() < 0.4 else None
        made.append((Adaptive(declared, size(1e-3, 0.5), size(60, 1e5)), measured))
    return made


def test_fixed_is_fixed() -> None:
    saved = [step for step in range(1, 31) if decide(Fixed(7), replace(MEASURED, step=step)).save]
    assert saved == [7, 14, 21, 28]


def test_events_always_save() -> None:
    for event in ("signal", "end", "new best"):
        for policy in (Fixed(1000), Adaptive()):
            decision = decide(policy, replace(MEASURED, step=3, since_save=0.1), event)
            assert (decision.save, decision.reason) == (True, event)


def test_young_and_daly_where_no_bound_is_met() -> None:
    wanted = interval(Adaptive(between_failures=3600.0), MEASURED)
    assert wanted.seconds == pytest.approx(math.sqrt(2 * 1.0 * 3600) - 1)
    assert wanted.reason == "a save stops training for 1 s, a failure every 60 min (declared)"


def test_it_is_the_least_costly_interval() -> None:
    """By brute force over the sum that it is said to make least: time in saves, and work lost."""
    for blocked, between in ((0.1, 600), (1, 3600), (10, 3600), (30, 86_400)):
        measured = replace(MEASURED, blocked_seconds=blocked, write_seconds=blocked)
        chosen = interval(Adaptive(between, longest_loss=1e9), measured).seconds

        def cost(seconds: float, blocked: float = blocked, between: float = between) -> float:
            segment = seconds + blocked
            return between * math.expm1(segment / between) / seconds  # exact, for exponential failures

        least = min(cost(blocked * 1.02**power) for power in range(600))
        assert cost(chosen) < least * 1.002


def test_bounds_hold_and_a_sentence_says_why() -> None:
    for policy, measured in draws(5000, 0):
        blocked, write = costs(measured)
        wanted = interval(policy, measured)
        between, source = between_failures(policy, measured)
        most = policy.longest_loss - write - measured.step_seconds
        assert wanted.seconds >= write - 1e-9  # never two at a time
        assert wanted.seconds <= max(most, write) + 1e-9
        young = max(0.0, math.sqrt(2 * blocked * between) - blocked)
        if source == "(guessed)":
            share = blocked / (wanted.seconds + blocked)
            assert share <= policy.overhead + 1e-9 or wanted.seconds == pytest.approx(max(most, write))
        elif write < young < most:
            assert wanted.seconds == pytest.approx(young)
        decision = decide(policy, measured)
        assert decision.save == (measured.since_save + measured.step_seconds / 2 >= wanted.seconds)
        assert "\n" not in decision.reason
        assert len(decision.reason) < 150


def test_no_more_is_lost_than_was_allowed() -> None:
    """Step by step: when a save is published, everything since the one before has been at stake."""
    for step_seconds in (0.3, 2.0, 17.0):
        policy = Adaptive(longest_loss=120.0)
        since, worst = 0.0, 0.0
        for _ in range(1000):
            since += step_seconds
            measured = replace(MEASURED, step_seconds=step_seconds, since_save=since, blocked_seconds=5.0)
            worst = max(worst, since + 20.0)  # MEASURED takes 20 s to write
            if decide(policy, measured).save:
                since = 0.0
        assert 120.0 - 2 * step_seconds - 1 <= worst <= 120.0


def test_more_failures_more_saves_and_dearer_saves_fewer() -> None:
    free = Adaptive(longest_loss=1e9)
    seen = [
        interval(free, replace(MEASURED, failures=n, wall_seconds=1e5, write_seconds=1.0)).seconds
        for n in (1, 2, 5, 20, 100)
    ]
    assert seen == sorted(seen, reverse=True)
    assert len(set(seen)) == 5
    dear = [
        interval(free, replace(MEASURED, failures=5, wall_seconds=1e5, blocked_seconds=c)).seconds
        for c in (1.0, 2.0, 4.0, 8.0)
    ]
    assert dear == sorted(dear)
    assert len(set(dear)) == 4


def test_the_first_save_goes_by_an_estimate() -> None:
    first = replace(MEASURED, blocked_seconds=None, write_seconds=None)
    assert costs(first) == (0.5, 10.0)
    assert 10 < interval(Adaptive(), first).seconds < 1800


def test_what_was_seen_outweighs_the_guess() -> None:
    assert between_failures(Adaptive(), MEASURED) == (pytest.approx(GUESS), "(guessed)")
    for real in (600.0, 3600.0, 864_000.0):
        seen, source = between_failures(Adaptive(), replace(MEASURED, failures=20, wall_seconds=20 * real))
        assert 0.9 * real < seen < 2 * real
        assert source == "(20 seen)"
    assert between_failures(Adaptive(60.0), replace(MEASURED, failures=20))[0] == 60.0


def test_simulated_it_beats_every_fixed_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small version of the benchmark. At each point the best fixed interval is chosen in hindsight."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))
    from benchmarks.checkpoint import goodput

    points = goodput.simulate(20, betweens=(900.0, 6 * 3600.0, 86_400.0), work=24 * 3600.0)
    for point in points:
        assert point.learnt > max(point.fixed) - 0.04, point
        assert point.declared > max(point.fixed) - 0.03, point
    rows = goodput.summary(points)
    fixed = [row for name, row in rows.items() if name.endswith(" s")]
    assert len(fixed) == len(goodput.FIXED)
    for name in ("learnt", "declared"):
        assert rows[name][0] > max(mean for mean, _ in fixed) + 0.01  # on average over the grid
        assert rows[name][1] < min(worst for _, worst in fixed) - 0.05  # and at its worst point
