"""A model divided into stages is one process: loss, every gradient, their norm, steps of weights."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from glm_accelerate.checkpoint.checkpointer import Checkpointer, Save
from glm_accelerate.checkpoint.find import published
from glm_accelerate.checkpoint.format import OPTIMIZER, WEIGHTS
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.optim.mover import Mover
from glm_accelerate.parallel.place import Axes, Place
from glm_accelerate.parallel.ranks import Ranks, leave
from glm_accelerate.training.state import restore, resume_tensors
from glm_accelerate.training.step import forward_backward_of, train_step
from tests.distributed.one_process import (
    CPU,
    GLM4,
    MODELS,
    STEPS,
    divide,
    joined,
    model_of,
    same_as_one,
    step_of,
    steps_of,
)

LAYOUTS: dict[str, tuple[Axes, Sequence[int]]] = {
    "pipeline 2": (Axes(pipeline=2), (2, 3)),
    "pipeline 3": (Axes(pipeline=3), (1, 3, 1)),
    "data 2, pipeline 2": (Axes(pipeline=2, data=2), (4, 1)),
    "shard 2, pipeline 2": (Axes(pipeline=2, shard=2), (2, 3)),
    "tensor 2, pipeline 2": (Axes(pipeline=2, tensor=2), (3, 2)),
    "pipeline 4": (Axes(pipeline=4), (1, 2, 1, 1)),
    "data 2, tensor 2, pipeline 2": (Axes(pipeline=2, data=2, tensor=2), (1, 2)),
}


def one_rank(rank: int, ranks: int, folder: Path, steps: int) -> None:
    here, data = joined(rank, ranks, folder), partial(steps_of, count=steps)
    for layout, (axes, layers) in LAYOUTS.items():
        if axes.count(*axes.sizes) != ranks:
            continue
        for family, sizes in MODELS.items():
            methods = ("full", "lora", "prefix", "freeze") if family == "glm4" else ("full", "lora")
            for method in methods if ranks < 8 or family == "glm4" else ():
                sizes = replace(sizes, layers=sum(layers))
                place = Place(here, axes)
                same_as_one(place, sizes, method, f"{layout}, {family}, {method}", layers, data)
    look_on(Place(here, Axes(pipeline=ranks)))
    if ranks == 4:
        hand_on(here, folder)
    assert here.store is not None
    leave(here.store, ranks)


def look_on(place: Place) -> None:
    """Without gradients: all stages have one process's logits, and each needs to know a row's documents."""
    count = place.count("pipeline")
    sizes = replace(GLM4, layers=count)
    tokens = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(9), torch.arange(15)]).expand(2, -1)
    expected, model = model_of(sizes, "full").eval(), model_of(sizes, "full").eval()
    divide(model, place, (1,) * count)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, positions), expected(tokens, positions))
        forgetful = place.index("pipeline") == count - 1
        other = model(tokens, torch.arange(24).expand(2, -1) if forgetful else positions)
        assert (other - expected(tokens, positions)).abs().max() > 1e-3


def hand_on(ranks: Ranks, folder: Path) -> None:
    """What two stages that share products have saved is the same to the last bit when any other layout has
    loaded it and saved it again.
    """
    layouts: list[tuple[Axes, Sequence[int]]] = [
        (Axes(pipeline=2, tensor=2), (1, 3)),
        (Axes(data=4), ()),
        (Axes(shard=4), ()),
        (Axes(tensor=2, query=2), ()),
        (Axes(pipeline=4), (1, 1, 1, 1)),
        (Axes(pipeline=2, shard=2), (3, 1)),
    ]
    saved: list[Path] = []
    for number, (axes, layers) in enumerate(layouts):
        place, model = Place(ranks, axes), model_of(replace(GLM4, layers=4), "full")
        table = divide(model, place, layers)
        mover = Mover(torch.optim.AdamW([*table.weights.values()], lr=1e-2, foreach=False), table)
        if saved:
            restore(Reader(saved[0]), model, mover, saved[0])
        else:
            train_step(
                forward_backward_of(model, CPU, place), mover, step_of(1, *place.samples), 1e-2, place=place
            )
        saver = Checkpointer(folder / str(number), rank=ranks.rank, ranks=ranks.count, run_id="0" * 32)
        saver.save(Save(1, 1, resume_tensors(mover), {}, {}, {}), wait=True)
        (outcome,) = saver.close()
        assert outcome.error is None, outcome.error
        dist.barrier()
        saved += published(folder / str(number))
    for group in (WEIGHTS, OPTIMIZER):
        first, *others = (Reader(path).group(group) for path in saved)
        for other, (axes, _) in zip(others, layouts[1:], strict=True):
            assert first.keys() == other.keys()
            assert all(torch.equal(first[name], other[name]) for name in first), f"{axes}, {group}"


@pytest.mark.process
@pytest.mark.parametrize("steps", [STEPS, pytest.param(20, marks=pytest.mark.prove)])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_stages_are_one_process(ranks: int, steps: int, tmp_path: Path) -> None:
    mp.start_processes(one_rank, args=(ranks, tmp_path, steps), nprocs=ranks, start_method="forkserver")
