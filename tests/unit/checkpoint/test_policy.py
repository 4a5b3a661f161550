"""A decision follows from figures alone, and keeps its bounds whatever they are."""

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from glm_accelerate.checkpoint.policy import (
    GUESS,
    Measured,
    between_failures,
    costs,
    interval,
    is_due,
)
from glm_accelerate.config.schema import CheckpointSection as Section

MEASURED = Measured(
    step=100, since_save=0.0, step_seconds=2.0, state_bytes=10**9, blocked_seconds=1.0, write_seconds=20.0
)


def draws(number: int, seed: int) -> list[tuple[Section, Measured]]:
    draw = random.Random(seed)

    def size(low: float, high: float) -> float:
        return math.exp(draw.uniform(math.log(low), math.log(high)))

    made: list[tuple[Section, Measured]] = []
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
        declared = size(60, 1e7) if draw.random() < 0.4 else "auto"
        section = Section(between_failures=declared, overhead=size(1e-3, 0.5), longest_loss=size(60, 1e5))
        made.append((section, measured))
    return made


def test_fixed_is_fixed() -> None:
    saved = [step for step in range(1, 31) if is_due(Section(every=7), replace(MEASURED, step=step))]
    assert saved == [7, 14, 21, 28]


def test_young_and_daly_where_no_bound_is_met() -> None:
    wanted = interval(Section(between_failures=3600.0), MEASURED)
    assert wanted == pytest.approx(math.sqrt(2 * 1.0 * 3600) - 1)


def test_it_is_the_least_costly_interval() -> None:
    """By brute force over the sum that it is said to make least: time in saves, and work lost."""
    for blocked, between in ((0.1, 600), (1, 3600), (10, 3600), (30, 86_400)):
        measured = replace(MEASURED, blocked_seconds=blocked, write_seconds=blocked)
        chosen = interval(Section(between_failures=between, longest_loss=1e9), measured)

        def cost(seconds: float, blocked: float = blocked, between: float = between) -> float:
            segment = seconds + blocked
            return between * math.expm1(segment / between) / seconds  # exact, for exponential failures

        least = min(cost(blocked * 1.02**power) for power in range(600))
        assert cost(chosen) < least * 1.002


def test_bounds_hold() -> None:
    for policy, measured in draws(5000, 0):
        blocked, write = costs(measured)
        wanted = interval(policy, measured)
        between = between_failures(policy, measured)
        guessed = policy.between_failures == "auto" and not measured.failures
        most = policy.longest_loss - write - measured.step_seconds
        assert wanted >= write - 1e-9  # never two at a time
        assert wanted <= max(most, write) + 1e-9
        young = max(0.0, math.sqrt(2 * blocked * between) - blocked)
        if guessed:
            share = blocked / (wanted + blocked)
            assert share <= policy.overhead + 1e-9 or wanted == pytest.approx(max(most, write))
        elif write < young < most:
            assert wanted == pytest.approx(young)
        assert is_due(policy, measured) == (measured.since_save + measured.step_seconds / 2 >= wanted)


def test_no_more_is_lost_than_was_allowed() -> None:
    """Step by step: when a save is published, everything since the one before has been at stake."""
    for step_seconds in (0.3, 2.0, 17.0):
        policy = Section(longest_loss=120.0)
        since, worst = 0.0, 0.0
        for _ in range(1000):
            since += step_seconds
            measured = replace(MEASURED, step_seconds=step_seconds, since_save=since, blocked_seconds=5.0)
            worst = max(worst, since + 20.0)  # MEASURED takes 20 s to write
            if is_due(policy, measured):
                since = 0.0
        assert 120.0 - 2 * step_seconds - 1 <= worst <= 120.0


def test_more_failures_more_saves_and_dearer_saves_fewer() -> None:
    free = Section(longest_loss=1e9)
    seen = [
        interval(free, replace(MEASURED, failures=n, wall_seconds=1e5, write_seconds=1.0))
        for n in (1, 2, 5, 20, 100)
    ]
    assert seen == sorted(seen, reverse=True)
    assert len(set(seen)) == 5
    dear = [
        interval(free, replace(MEASURED, failures=5, wall_seconds=1e5, blocked_seconds=c))
        for c in (1.0, 2.0, 4.0, 8.0)
    ]
    assert dear == sorted(dear)
    assert len(set(dear)) == 4


def test_the_first_save_goes_by_an_estimate() -> None:
    first = replace(MEASURED, blocked_seconds=None, write_seconds=None)
    assert costs(first) == (0.5, 10.0)
    assert 10 < interval(Section(), first) < 1800


def test_what_was_seen_outweighs_the_guess() -> None:
    assert between_failures(Section(), MEASURED) == pytest.approx(GUESS)
    for real in (600.0, 3600.0, 864_000.0):
        seen = between_failures(Section(), replace(MEASURED, failures=20, wall_seconds=20 * real))
        assert 0.9 * real < seen < 2 * real
    assert between_failures(Section(between_failures=60.0), replace(MEASURED, failures=20)) == 60.0


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
