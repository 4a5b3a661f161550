"""Gradients of whole copies are summed while passes run, by node if there are several, as in one process."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from glm_accelerate.data.types import Step
from glm_accelerate.optim.mover import mover_of
from glm_accelerate.parallel import sums
from glm_accelerate.parallel.place import Axes, Place
from glm_accelerate.parallel.ranks import leave
from glm_accelerate.parallel.sums import GradientSums
from glm_accelerate.parallel.table import CutTable
from glm_accelerate.training.step import forward_backward_of, train_step
from tests.distributed.one_process import (
    CPU,
    GLM4,
    MODELS,
    divide,
    joined,
    model_of,
    same_as_one,
    step_of,
    steps_of,
)

SMALL = 16_384  # bytes of a bucket: a model of these tests has several, and matrices larger than one
NODES: dict[int, Sequence[tuple[str, ...]]] = {2: ((),), 3: ((),), 4: ((), ("a", "a", "b", "b"))}


def one_rank(rank: int, ranks: int, folder: Path) -> None:
    here, sums.BUCKET = joined(rank, ranks, folder), SMALL
    for nodes in NODES[ranks]:
        place = Place(replace(here, nodes=nodes), Axes(data=ranks))
        data = (steps_of, all_on_the_first) if ranks == 3 else (steps_of,)
        for deal in data:
            for family, method in (("plain", "full"), ("glm4", "lora")):
                same_as_one(place, MODELS[family], method, f"{family}, {method}, {nodes}", data=deal)
        what_one_rank_never_makes(place)
        sent_while_passes_run(place)
    if ranks == 4:
        uneven = replace(here, nodes=("a", "b", "b", "b"))
        what_one_rank_never_makes(Place(uneven, Axes(data=ranks)))
        staged = Place(here, Axes(pipeline=2, data=2))
        same_as_one(staged, MODELS["plain"], "full", "tied stages", layers=(1, 1))
    assert here.store is not None
    leave(here.store, ranks)


def all_on_the_first(place: Place) -> list[Step]:
    """Steps of which other ranks have not a single pass."""
    number, _ = place.samples
    steps = [step_of(each) for each in (1, 2, 3)]
    return [replace(step, batches=step.batches if number == 0 else ()) for step in steps]


class Branches(nn.Module):
    """Of which a rank may use some."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ParameterList(nn.Parameter(torch.zeros(3001)) for _ in range(6))

    def forward(self, without: set[int]) -> Tensor:
        used = [
            branch.sum() * (number + 1)
            for number, branch in enumerate(self.branches)
            if number not in without
        ]
        return torch.stack(used).sum()


def what_one_rank_never_makes(place: Place) -> None:
    """Ranks send in one order all the same; a gradient that no rank makes is zero."""
    model, (rank, ranks) = Branches(), place.samples
    table = GradientSums(CutTable(dict(model.named_parameters()), place))
    for passes in (1, 3):
        model.zero_grad()
        table.begin(passes)
        for turn in range(passes):
            model({2, rank + turn}).backward()
        table.finish()
        for number, branch in enumerate(model.branches):
            made = sum(number not in (2, rank + turn) for rank in range(ranks) for turn in range(passes))
            assert branch.grad is not None
            assert bool((branch.grad == made * (number + 1)).all()), (number, passes)


def sent_while_passes_run(place: Place) -> None:
    """By the trace of a step: sums begin between layers' backward passes of the last pass, and not before."""
    model = model_of(GLM4, "full")
    table = divide(model, place)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    passes = forward_backward_of(model, CPU, place)
    step = replace(step_of(1), batches=step_of(1).batches[:2])
    mover = mover_of(sgd, table)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        train_step(passes, mover, step, 0.0, place=place)
    events = sorted(trace.events() or (), key=lambda event: event.time_range.start)
    nodes = [event for event in events if event.name.startswith("autograd::engine::evaluate_function")]
    added = [event for event in nodes if event.name.endswith("AccumulateGrad")]
    first, last = added[len(added) // 2], added[-1]  # of the last pass
    name = "c10d::reduce_scatter_" if place.ranks.nodes else "c10d::allreduce_"
    sent = [event.time_range.start for event in events if event.name == name]
    assert min(sent) > first.time_range.start
    assert len([start for start in sent if start < last.time_range.start]) >= sums.BUCKETS


@pytest.mark.process
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_copies_are_one_process(ranks: int, tmp_path: Path) -> None:
    mp.start_processes(one_rank, args=(ranks, tmp_path), nprocs=ranks, start_method="forkserver")
