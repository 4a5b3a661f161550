"""Which layers go to which stage by how long each computes, and when that pays."""

import pytest

from glm_accelerate.parallel.place import Axes
from glm_accelerate.plan.schedule import LayerCosts
from glm_accelerate.training.stages import better_stages, busy_of

COSTS, EVEN = LayerCosts((1.0,) * 12, last=0.0), (6, 6)


def test_a_stage_is_as_slow_as_its_slowest_rank() -> None:
    assert busy_of([1.0, 3.0, 2.0, 2.5], Axes(pipeline=2, data=2)) == [3.0, 2.5]


@pytest.mark.parametrize(("busy", "stages"), [([6.0, 12.0], (8, 4)), ([18.0, 6.0], (3, 9))])
def test_the_slow_stage_gives_layers_away(busy: list[float], stages: tuple[int, ...]) -> None:
    found = better_stages(COSTS, EVEN, busy, 16, 1000, 10.0)
    assert found is not None
    cut, now, then = found
    assert cut == stages
    assert now >= max(busy) > then


def test_what_the_head_took_more_than_planned_is_made_up_for() -> None:
    costs = LayerCosts((1.0,) * 12, last=2.0)
    found = better_stages(costs, (7, 5), [7.0, 14.0], 16, 1000, 10.0)
    assert found is not None
    assert found[0] == (9, 3)


@pytest.mark.parametrize(
    ("busy", "passes", "left", "start"),
    [
        ([6.0, 6.0], 16, 1000, 10.0),  # nothing is slow
        ([6.0, 6.4], 16, 1000, 10.0),  # by less than a layer
        ([6.0, 12.0], 16, 4, 10.0),  # too few steps are left to repay a start
    ],
)
def test_else_all_stay(busy: list[float], passes: int, left: int, start: float) -> None:
    assert better_stages(COSTS, EVEN, busy, passes, left, start) is None
