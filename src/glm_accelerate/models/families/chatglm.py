"""`chatglm`: ChatGLM2-6B, ChatGLM3-6B and GLM-4-9B as they were published with remote code."""

from collections.abc import Mapping
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
    """`rope_ratio` scales the base of the rotary angles; the converters of transformers lose it."""
    if not config.get("rmsnorm", True) or not config.get("post_layer_norm", True):
        raise ValueError("only models with RMSNorm and a final norm are supported")
    if config.get("apply_residual_connection_post_layernorm", False) or config.get("add_bias_linear", False):
        raise ValueError("this variant of ChatGLM (post-norm residuals or linear biases) is not supported")
    check_activation(config)
    heads, head_width = whole(config, "num_attention_heads"), whole(config, "kv_channels", 128)
    grouped = config.get("multi_query_attention", False)
    kv_heads = whole(config, "multi_query_group_num", 1) if grouped else heads
    check_attention(
        ("num_attention_heads", heads),
        ("multi_query_group_num", kv_heads),
        ("kv_channels", head_width // 2),
        head_width,
    )
    return Sizes(
        vocabulary=whole(config, "padded_vocab_size"),
        width=whole(config, "hidden_size"),
        mlp_width=whole(config, "ffn_hidden_size"),
        layers=whole(config, "num_layers", most=MOST_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        norm_epsilon=positive(config, "layernorm_epsilon", 1e-5),
        rope_theta=10000.0 * positive(config, "rope_ratio", 1),
        rope_width=head_width // 2,
        qkv_bias=bool(config.get("add_qkv_bias", False)),
        max_positions=whole(config, "seq_length", 2048),
        fused_qkv=True,
        tied=bool(config.get("tie_word_embeddings", False)),
    )


CHATGLM = Family(
    name="chatglm",
    read=read,
    layer_prefix="transformer.encoder.layers.{N}",
    outer={
        "embed": "transformer.embedding.word_embeddings.weight",
        "norm.weight": "transformer.encoder.final_layernorm.weight",
        "head.weight": "transformer.output_layer.weight",
    },
    inner={
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_attention_layernorm",
        "self_attn.query_key_value": "self_attention.query_key_value",
        "self_attn.o_proj": "self_attention.dense",
        "mlp.gate_up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
    ignored=("transformer.rotary_pos_emb.inv_freq",),
)
