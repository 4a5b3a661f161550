"""What ranks that share a copy of the state divide between passes changes what travels, and nothing else."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch.multiprocessing as mp
from torch.optim import SGD
from torch.profiler import ProfilerActivity, profile

from glm_accelerate.data.types import Step
from glm_accelerate.optim.mover import mover_of
from glm_accelerate.parallel.place import Axes, Place
from glm_accelerate.parallel.ranks import leave
from glm_accelerate.training.step import forward_backward_of, train_step
from tests.distributed.one_process import CPU, GLM4, MODELS, divide, joined, model_of, same_as_one, step_of

LAYOUTS = {
    2: ((Axes(shard=2), ()),),
    4: ((Axes(data=2, shard=2), ()), (Axes(pipeline=2, shard=2), (1, 1))),
}


def twice(place: Place) -> list[Step]:
    """Steps of two passes or more on each rank."""
    once = [step_of(number, *place.samples) for number in (1, 2, 3)]
    return [replace(step, batches=step.batches * 2, targets=step.targets * 2) for step in once]


def one_rank(rank: int, ranks: int, folder: Path) -> None:
    here = joined(rank, ranks, folder)
    for axes, layers in LAYOUTS[ranks]:
        place = Place(here, axes)
        for zero in (1, 2):
            for family, method in (("plain", "full"), ("glm4", "lora")):
                what = f"{axes}, ZeRO-{zero}, {family}, {method}"
                same_as_one(place, MODELS[family], method, what, layers, twice, zero=zero)
    if ranks == 2:
        for zero, expected in ((1, (1, 1)), (2, (1, 4)), (3, (8, 4))):
            assert travelled(Place(here, Axes(shard=2)), zero) == expected, zero
    assert here.store is not None
    leave(here.store, ranks)


def travelled(place: Place, zero: int) -> tuple[int, int]:
    """How often a block's weights are gathered, and its gradients summed, in a step of four passes."""
    model = model_of(GLM4, "full")
    table = divide(model, place)
    mover, passes = (
        mover_of(SGD(model.parameters(), lr=0.0), table),
        forward_backward_of(model, CPU, place, zero=zero),
    )
    (step, *_) = twice(place)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        train_step(passes, mover, step, 0.0, place=place)
    found = Counter(event.name for event in trace.events() or ())
    return found["FSDP::all_gather (layers.0)"], found["FSDP::post_backward_reduce (layers.0)"]


@pytest.mark.process
@pytest.mark.parametrize("ranks", [2, 4])
def test_zero_is_one_process(ranks: int, tmp_path: Path) -> None:
    mp.start_processes(one_rank, args=(ranks, tmp_path), nprocs=ranks, start_method="forkserver")
