"""`glm`: GLM-4-9B in the form that transformers reads, and any ChatGLM2/3 converted to it."""

from collections.abc import Mapping
from typing import Any

from glm_accelerate.models.families.family import Family
from glm_accelerate.models.sizes import Sizes


def read(config: Mapping[str, Any]) -> Sizes:
    """Both spellings of rotary settings: flat (transformers 4) and under rope_parameters (5)."""
    rope: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope_type {kind!r} is not supported yet; only default")
    heads, width = config["num_attention_heads"], config["hidden_size"]
    head_width = config.get("head_dim") or width // heads
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.5))
    return Sizes(
        vocabulary=config["vocab_size"],
        width=width,
        mlp_width=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config["num_key_value_heads"],
        head_width=head_width,
        norm_epsilon=config["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        rope_width=int(head_width * share),
        qkv_bias=bool(config.get("attention_bias", True)),
        max_positions=config.get("max_position_embeddings", 131072),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


OUTER = {
    "embed": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
INNER = {
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

GLM = Family(name="glm", read=read, layer_prefix="model.layers.{N}", outer=OUTER, inner=INNER)
