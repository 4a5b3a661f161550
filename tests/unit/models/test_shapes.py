"""The shapes by which plans count are those of the model's weights."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from glm_accelerate.export.compress import compress
from glm_accelerate.models.shapes import shapes_of
from glm_accelerate.models.weights import load_model

Make = Callable[..., Path]


@pytest.mark.parametrize("family", ["glm", "glm4", "chatglm"])
def test_of_a_plain_model(family: str, make_model: Make) -> None:
    model = load_model(make_model(family))
    shapes = shapes_of(model.sizes)
    assert shapes.parameters == sum(p.numel() for p in model.parameters())
    inside = sum(p.numel() for name, p in model.layers.named_parameters() if p.ndim == 2)
    assert shapes.multiplied == inside
    assert all(each.blocks == (block,) for block, found in enumerate(shapes.blocks) for each in found)
    tied = shapes_of(replace(model.sizes, tied=True))
    assert shapes.parameters - tied.parameters == model.head.weight.numel()


def test_of_a_compressed_model(make_model: Make) -> None:
    model = compress(load_model(make_model("glm4")), share_qk=2, keep_energy=0.6)
    shapes = shapes_of(model.sizes)
    assert shapes.parameters == sum(p.numel() for p in model.parameters())
    queries, keys, *_, down = shapes.blocks[1]
    assert (queries.name, queries.blocks) == ("q_proj", (0, 1))
    assert (keys.name, keys.blocks) == ("k_proj", (0, 1))
    rank = model.sizes.ranks["layers.1.mlp.down_proj"]
    assert [(each.inputs, each.outputs) for each in down.layers] == [(100, rank), (rank, 60)]
    once = sum(p.numel() for p in model.layers.parameters() if p.ndim == 2)
    assert shapes.multiplied == once + sum(each.weights for part in (queries, keys) for each in part.layers)
