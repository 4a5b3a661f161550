"""`glm`: GLM-4-9B in the form that transformers reads, and any ChatGLM2/3 converted to it; `glm4`: GLM-4-0414
and GLM-Z1, which norm what each branch returns.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from glm_accelerate.models.families.family import (
    MOST_LAYERS,
    Family,
    check_activation,
    check_attention,
    positive,
    whole,
)
from glm_accelerate.models.sizes import Sizes


def read(config: Mapping[str, Any]) -> Sizes:
    """Both spellings of rotary settings: flat (transformers 4) and under rope_parameters (5)."""
    rope: Any = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"rope_parameters is {rope!r}, which is not a mapping")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope_type {kind!r} is not supported yet; only default")
    check_activation(config)
    rotary = {**config, **rope}
    heads, kv_heads = whole(config, "num_attention_heads"), whole(config, "num_key_value_heads")
    width = whole(config, "hidden_size")
    head_width = width // heads if config.get("head_dim") is None else whole(config, "head_dim")
    rope_width = int(head_width * positive(rotary, "partial_rotary_factor", 0.5))
    check_attention(
        ("num_attention_heads", heads),
        ("num_key_value_heads", kv_heads),
        ("partial_rotary_factor", rope_width),
        head_width,
    )
    return Sizes(
        vocabulary=whole(config, "vocab_size"),
        width=width,
        mlp_width=whole(config, "intermediate_size"),
        layers=whole(config, "num_hidden_layers", most=MOST_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        norm_epsilon=positive(config, "rms_norm_eps"),
        rope_theta=positive(rotary, "rope_theta", 10000.0),
        rope_width=rope_width,
        qkv_bias=bool(config.get("attention_bias", True)),
        max_positions=whole(config, "max_position_embeddings", 131072),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def read_with_sandwich(config: Mapping[str, Any]) -> Sizes:
    """`glm` with norms around each branch."""
    return replace(read(config), sandwich=True)


_OUTER = {
    "embed": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_INNER = {
    name: name
    for name in (
        "input_layernorm",
        "post_attention_layernorm",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_up_proj",
        "mlp.down_proj",
    )
}

GLM = Family(name="glm", read=read, layer_prefix="model.layers.{N}", outer=_OUTER, inner=_INNER)
GLM4 = Family(
    name="glm4",
    read=read_with_sandwich,
    layer_prefix="model.layers.{N}",
    outer=_OUTER,
    inner=_INNER | {name: name for name in ("post_self_attn_layernorm", "post_mlp_layernorm")},
)
