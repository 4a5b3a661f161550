"""What config.json says of a compressed model, and the numbers of a rank among some that share products."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from glm_accelerate.models.sizes import (
    Compression,
    Sizes,
    compressed_config,
    plain_config,
    structure_in_words,
)
from glm_accelerate.models.weights import load_model, read_config
from glm_accelerate.runtime.errors import UserError

Make = Callable[..., Path]
GLM_9B = Sizes(151_552, 4096, 13_696, 40, 32, 2, 128, 1e-5, 1e4, 64, True, 131_072)
DONE = Compression(2, {"layers.0.mlp.down_proj": 16, "layers.2.mlp.down_proj": 32})


def test_it_is_written_and_read(make_model: Make) -> None:
    path = make_model("chatglm")
    _, plain, config = read_config(path)
    sizes = DONE.applied_to(plain)
    assert not sizes.plain
    assert not sizes.fused_qkv  # what is shared is split
    written = json.loads(json.dumps(compressed_config(sizes, config)))
    assert written["model_type"] not in ("glm", "glm4", "chatglm")  # nobody opens it by mistake
    assert plain_config(written, "here") == (config, DONE)
    assert plain_config(config, "here") == (config, Compression())
    assert (
        structure_in_words(sizes)
        == "each 2 layers share queries and keys, 2 matrices factored at ranks 16 to 32"
    )
    (path / "config.json").write_text(json.dumps(written))
    assert read_config(path)[1:] == (sizes, config)


@pytest.mark.parametrize(
    "damage", [{"structure": None}, {"structure": {"share_qk": 0, "ranks": {}}}, {"model": 3}]
)
def test_a_damaged_one_is_named(damage: dict[str, object], make_model: Make) -> None:
    _, plain, config = read_config(make_model("glm4"))
    with pytest.raises(UserError, match="does not say how"):
        plain_config({**compressed_config(DONE.applied_to(plain), config), **damage}, "here")


def test_a_layer_that_is_not_there_is_missed(make_model: Make) -> None:
    path = make_model("glm4")
    _, plain, config = read_config(path)
    written = compressed_config(Compression(1, {"layers.1.mlp.down_proj": 16}).applied_to(plain), config)
    (path / "config.json").write_text(json.dumps(written))
    with pytest.raises(UserError, match="tensors missing"):
        load_model(path)


def test_each_rank_has_its_heads_its_part_of_the_mlp_and_its_words() -> None:
    two, eight = GLM_9B.part(2), GLM_9B.part(8)
    assert (two.heads, two.kv_heads, two.mlp_width, two.vocabulary) == (16, 1, 6848, 75_776)
    assert (eight.heads, eight.kv_heads, eight.mlp_width, eight.vocabulary) == (4, 1, 1712, 18_944)
    assert (eight.width, eight.layers, eight.head_width) == (4096, 40, 128)
    assert replace(GLM_9B, kv_heads=8).part(32).kv_heads == 1
    assert replace(GLM_9B, vocabulary=151_551).part(2).vocabulary == 151_551  # all of them on every rank


@pytest.mark.parametrize(
    ("sizes", "ranks", "why"),
    [
        (GLM_9B, 3, "32 heads and MLPs of 13696 are not 3 equal parts"),
        (replace(GLM_9B, kv_heads=6), 4, "6 key heads are not divided among 4 ranks"),
        (replace(GLM_9B, fused_qkv=True), 4, "2 key heads are not divided among 4 ranks"),
        (replace(GLM_9B, shared_qk=2), 2, "the model shares or factors matrices"),
    ],
)
def test_what_cannot_be_shared_is_named(sizes: Sizes, ranks: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        sizes.part(ranks)
