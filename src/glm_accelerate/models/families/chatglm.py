"""`chatglm`: ChatGLM2-6B, ChatGLM3-6B and GLM-4-9B as they were published with remote code."""

from collections.abc import Mapping
from typing import Any

from glm_accelerate.models.families.family import Family
from glm_accelerate.models.sizes import Sizes


def read(config: Mapping[str, Any]) -> Sizes:
    """`rope_ratio` scales the base of the rotary angles; the converters of transformers lose it."""
    if not config.get("rmsnorm", True) or not config.get("post_layer_norm", True):
        raise ValueError("only models with RMSNorm and a final norm are supported")
    if config.get("apply_residual_connection_post_layernorm", False) or config.get("add_bias_linear", False):
        raise ValueError("this variant of ChatGLM (post-norm residuals or linear biases) is not supported")
    heads, head_width = config["num_attention_heads"], config.get("kv_channels", 128)
    grouped = config.get("multi_query_attention", False)
    return Sizes(
        vocabulary=config["padded_vocab_size"],
        width=config["hidden_size"],
        mlp_width=config["ffn_hidden_size"],
        layers=config["num_layers"],
        heads=heads,
        kv_heads=config.get("multi_query_group_num", 1) if grouped else heads,
        head_width=head_width,
        norm_epsilon=config.get("layernorm_epsilon", 1e-5),
        rope_theta=10000.0 * config.get("rope_ratio", 1),
        rope_width=head_width // 2,
        qkv_bias=bool(config.get("add_qkv_bias", False)),
        max_positions=config.get("seq_length", 2048),
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
