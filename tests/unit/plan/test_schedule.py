"""A pipeline's arithmetic: its order never waits for itself, its cuts are the best there are."""

from itertools import combinations, pairwise

import pytest

from glm_accelerate.plan.schedule import (
    LayerCosts,
    StagePass,
    cut_stages,
    in_flight,
    one_forward_one_backward,
    seconds_of,
)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("passes", [1, 2, 4, 9])
def test_every_stage_runs_every_pass_once_and_holds_no_more_than_said(stages: int, passes: int) -> None:
    for stage in range(stages):
        order = one_forward_one_backward(stage, stages, passes)
        assert sorted(order) == sorted(
            StagePass(way, number) for way in ("forward", "backward") for number in range(passes)
        )
        held = most = 0
        for run in order:
            held += 1 if run.way == "forward" else -1
            most = max(most, held)
        assert most == in_flight(stage, stages, passes)
        for way in ("forward", "backward"):  # messages between stages are in one order
            assert [run.number for run in order if run.way == way] == list(range(passes))


@pytest.mark.parametrize(("stages", "passes"), [(1, 1), (2, 1), (2, 8), (4, 4), (8, 176)])
def test_equal_stages_idle_by_the_formula(stages: int, passes: int) -> None:
    taken = seconds_of([1.0] * stages, [2.0] * stages, passes)
    assert taken == pytest.approx(3 * (passes + stages - 1))


def test_the_slowest_stage_decides() -> None:
    balanced = seconds_of([2, 2, 2], [4, 4, 4], 12)
    assert seconds_of([1, 1, 4], [2, 2, 8], 12) > 1.5 * balanced
    assert seconds_of([2, 2], [4, 4], 4, edge=1.0) > seconds_of([2, 2], [4, 4], 4)


def test_a_cut_is_the_best_of_all() -> None:
    costs = LayerCosts((3.0, 1, 1, 4, 1, 5, 9, 2), first=1.0, last=6.0)
    for stages in (1, 2, 3, 4):
        chosen = cut_stages(costs, stages)
        assert chosen is not None
        every = [
            max(costs.of(a, b) for a, b in pairwise((0, *at, 8)))
            for at in combinations(range(1, 8), stages - 1)
        ]
        bounds = [sum(chosen[:number]) for number in range(stages + 1)]
        assert max(costs.of(a, b) for a, b in pairwise(bounds)) == min(every)


def test_the_head_counts_and_any_number_of_layers_will_do() -> None:
    assert cut_stages(LayerCosts((1.0,) * 46, last=1.0), 4) == (11, 12, 12, 11)
    assert cut_stages(LayerCosts((1.0,) * 40, last=10.0), 2) == (25, 15)


def test_memory_moves_a_cut_and_may_forbid_all() -> None:
    costs = LayerCosts((1.0,) * 8)
    assert cut_stages(costs, 2, lambda stage, start, stop: stop - start <= (3 if stage == 0 else 8)) == (3, 5)
    assert cut_stages(costs, 2, lambda stage, start, stop: stop - start <= 3) is None
    assert cut_stages(costs, 9) is None
