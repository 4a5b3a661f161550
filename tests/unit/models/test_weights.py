"""A model whose config.json or tensors cannot be is refused in one line that names the key or the tensor."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm_accelerate.models.weights import load_model, read_config
from glm_accelerate.runtime.errors import UserError

GLM_MISTAKES = [
    ("num_attention_heads", 3, "num_attention_heads 3 is not a multiple of num_key_value_heads 2"),
    ("num_key_value_heads", 4, "num_attention_heads 6 is not a multiple of num_key_value_heads 4"),
    ("num_key_value_heads", 0, "num_key_value_heads is 0: a whole number of 1 or more"),
    ("num_attention_heads", 0, "num_attention_heads is 0"),
    ("num_hidden_layers", -1, "num_hidden_layers is -1"),
    ("num_hidden_layers", 10**9, "num_hidden_layers is 1000000000: at most 1,000"),
    ("hidden_size", 60.0, "hidden_size is 60.0"),
    ("hidden_size", True, "hidden_size is True"),
    ("vocab_size", "131", "vocab_size is '131'"),
    ("vocab_size", None, "vocab_size is None"),
    ("intermediate_size", [100], "intermediate_size is [100]"),
    ("head_dim", 0, "head_dim is 0"),
    ("max_position_embeddings", 0, "max_position_embeddings is 0"),
    ("rms_norm_eps", "1e-5", "rms_norm_eps is '1e-5': a number above 0"),
    ("rms_norm_eps", -1, "rms_norm_eps is -1"),
    ("rope_theta", 0, "rope_theta is 0"),
    ("partial_rotary_factor", -1, "partial_rotary_factor is -1"),
    ("partial_rotary_factor", 2, "by partial_rotary_factor 32 dimensions of a head are rotated"),
    ("partial_rotary_factor", 0.2, "by partial_rotary_factor 3 dimensions"),
    ("rope_parameters", [1], "is not a mapping"),
    ("hidden_act", "gelu", "hidden_act 'gelu' is not supported: silu is expected"),
]
CHATGLM_MISTAKES = [
    ("num_attention_heads", 3, "num_attention_heads 3 is not a multiple of multi_query_group_num 2"),
    ("num_layers", 0, "num_layers is 0"),
    ("kv_channels", 6, "by kv_channels 3 dimensions"),
    ("rope_ratio", -1, "rope_ratio is -1"),
    ("layernorm_epsilon", None, "layernorm_epsilon is None"),
]


@pytest.mark.parametrize(
    ("family", "key", "value", "said"),
    [
        *(("glm", *mistake) for mistake in GLM_MISTAKES),
        *(("chatglm", *mistake) for mistake in CHATGLM_MISTAKES),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(
    family: str, key: str, value: object, said: str, make_model: Callable[..., Path]
) -> None:
    directory = make_model(family)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(UserError) as caught:
        read_config(directory)
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool])
def test_packed_numbers_are_no_weights(dtype: torch.dtype, make_model: Callable[..., Path]) -> None:
    directory = make_model("glm4")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    save_file({**tensors, name: tensors[name].to(dtype)}, file)
    with pytest.raises(UserError, match=rf"{name} is \w+: float32, bfloat16 or float16 is expected"):
        load_model(directory)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("vocab_size", 132, "weight is [131, 60], config.json says [132, 60]"),
        ("hidden_size", 62, "config.json says"),
        ("head_dim", 20, "config.json says"),
        ("num_hidden_layers", 4, "tensors missing: model.layers.3."),
        ("num_hidden_layers", 2, "unexpected: model.layers.2."),
    ],
)
def test_sizes_that_are_not_those_of_the_tensors(
    key: str, value: int, said: str, make_model: Callable[..., Path]
) -> None:
    directory = make_model("glm")
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(UserError) as caught:
        load_model(directory)
    assert said in str(caught.value)


def test_an_untied_head_must_be_there_and_a_tied_one_may_be(make_model: Callable[..., Path]) -> None:
    directory = make_model("glm")
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    assert load_model(directory).sizes.tied
    tensors = load_file(directory / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if n != "lm_head.weight"}, directory / "model.safetensors")
    assert load_model(directory).sizes.tied
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": False}))
    with pytest.raises(UserError, match=r"1 tensors missing: lm_head\.weight"):
        load_model(directory)


def test_an_adapter_in_the_place_of_a_model_is_told_where_it_goes(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"it is an adapter: .* --init-from"):
        load_model(tmp_path)
