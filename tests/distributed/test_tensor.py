"""A model divided over the tensor axis is one process: loss, every gradient, their norm, steps of weights."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

from glm_accelerate.parallel.place import Axes, Place
from glm_accelerate.parallel.ranks import leave
from glm_accelerate.parallel.tensor import cut_model
from tests.distributed.one_process import GLM4, MODELS, STEPS, joined, model_of, same_as_one, steps_of

LAYOUTS = {
    "tensor 2": Axes(tensor=2),
    "tensor 4, two for each key head": Axes(tensor=2, query=2),
    "data 2, tensor 2": Axes(data=2, tensor=2),
    "shard 2, tensor 2": Axes(shard=2, tensor=2),
    "shard 2, two for one key head": Axes(shard=2, query=2),
}


def one_rank(rank: int, ranks: int, folder: Path, steps: int) -> None:
    here, data = joined(rank, ranks, folder), partial(steps_of, count=steps)
    for layout, axes in LAYOUTS.items():
        if axes.count(*axes.sizes) != ranks:
            continue
        for family, sizes in MODELS.items():
            for method in ("full", "lora", "prefix"):
                if axes.query > 1 and sizes.fused_qkv:
                    continue
                if axes.query > axes.tensor:
                    sizes = replace(sizes, kv_heads=1)
                place = Place(here, axes)
                same_as_one(place, sizes, method, f"{layout}, {family}, {method}", data=data)
        for kind in ("nf4", "int8") if axes.query == 1 else ():
            sizes = replace(GLM4, head_width=16, rope_width=8, mlp_width=128)  # parts of whole blocks
            same_as_one(Place(here, axes), sizes, kind, f"{layout}, {kind}", data=data)
    drop(Place(here, Axes(tensor=2, data=ranks // 2)))
    norm_a_part(Place(here, Axes(tensor=2, query=ranks // 2)))
    assert here.store is not None
    leave(here.store, ranks)


def drop(place: Place) -> None:
    """Ranks drop the same of an input that all have, other inputs of a layer that each has some of, and draw
    alike again after it.
    """
    model = model_of(GLM4, "lora", dropout=0.5)
    cut_model(model, place)
    attention = model.layers[0].self_attn
    torch.manual_seed(7)
    for layer, alike in ((attention.q_proj, True), (attention.o_proj, False), (attention.v_proj, True)):
        layer.bias = None
        nn.init.zeros_(layer.weight)
        layer.lora_A.data = (2.0 ** -torch.arange(layer.inputs)).expand(8, -1).contiguous().double()
        nn.init.ones_(layer.lora_B)
        kept = layer(torch.ones(1, 1, layer.inputs, dtype=torch.float64)).flatten()[:1].detach()
        other = kept.clone()
        place.sum_(other, "tensor")
        assert bool((other == 2 * kept).all()) == alike


def norm_a_part(place: Place) -> None:
    """With gradients a norm has this rank's part of the tokens, without them all: answers have any length."""
    model, seen = model_of(GLM4, "lora"), list[int]()
    cut_model(model, place)
    model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    assert model(torch.zeros(2, 24, dtype=torch.long)).shape == (2, 24, 96)
    with torch.no_grad():
        model(torch.zeros(2, 5, dtype=torch.long))
    assert seen == [24 // place.ranks.count, 5]


@pytest.mark.process
@pytest.mark.parametrize("steps", [STEPS, pytest.param(20, marks=pytest.mark.prove)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_divided_block_is_one_process(ranks: int, steps: int, tmp_path: Path) -> None:
    mp.start_processes(one_rank, args=(ranks, tmp_path, steps), nprocs=ranks, start_method="forkserver")
