"""What config.json says of a compressed model."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from glm_accelerate.models.sizes import Compression, compressed_config, plain_config, structure_in_words
from glm_accelerate.models.weights import load_model, read_config
from glm_accelerate.runtime.errors import UserError

Make = Callable[..., Path]
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
