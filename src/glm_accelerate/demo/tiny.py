"""Writes a tiny, real GLM-4-0414 with random weights: the files, names and template of a big one.

Only the sizes differ, so everything that the demo does to it works on the published models as well.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from glm_accelerate.data.templates.glm4 import GLM4_0414
from glm_accelerate.data.tokenizers import PATTERN, SPECIAL

# How GLM-4-0414 writes a conversation: tools, then system messages, then the other turns.
CHAT_TEMPLATE = """\
[gMASK]<sop>
{%- if tools -%}
<|system|>
# 可用工具
{% for tool in tools %}
{%- set described = tool.function if tool.function else tool %}

## {{ described.name }}

{{ described | tojson(indent=4, ensure_ascii=False) }}
在调用上述函数时，请使用 Json 格式表示调用的参数。
{%- endfor %}
{%- endif -%}
{%- for turn in messages if turn.role == 'system' %}<|system|>
{{ turn.content }}
{%- endfor %}
{%- for turn in messages if turn.role != 'system' -%}
<|{{ turn.role }}|>{% if turn.metadata %}{{ turn.metadata }} {% endif %}
{{ '\\n' + turn.content }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

# The gains of the norms. What a branch adds starts small beside the embedding, so that training can be short.
BRANCH = 0.3
NORMS = {
    "input_layernorm": 1.0,
    "post_self_attn_layernorm": BRANCH,
    "post_attention_layernorm": 1.0,
    "post_mlp_layernorm": BRANCH,
}


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of the tiny model."""

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 384


def build_tokenizer(words: Sequence[str]) -> Tokenizer:
    """A byte-level BPE in which each of these words is one token; everything else is spelt in bytes."""
    tokenizer = Tokenizer(BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of_words])  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = BpeTrainer(
        vocab_size=4096,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    # Characters first: else the last byte of one and the first of the next could become a token.
    characters = [character for word in words for character in word if not character.isascii()]
    tokenizer.train_from_iterator([*words, *characters * 20], trainer=trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return tokenizer


def config(size: Size, vocabulary: int, special: dict[str, int]) -> dict[str, object]:
    """config.json as GLM-4-0414 has it."""
    return {
        "architectures": ["Glm4ForCausalLM"],
        "model_type": "glm4",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": [special[name] for name in GLM4_0414.stops],
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "hidden_size": size.hidden,
        "initializer_range": 0.02,
        "intermediate_size": size.ffn,
        "max_position_embeddings": 2048,
        "num_attention_heads": size.heads,
        "num_hidden_layers": size.layers,
        "num_key_value_heads": size.kv_heads,
        "pad_token_id": special["<|endoftext|>"],
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": vocabulary,
    }


def weights(size: Size, vocabulary: int, seed: int) -> dict[str, torch.Tensor]:
    """Random weights under the published names."""
    draw = torch.Generator().manual_seed(seed)
    hidden, query, key = size.hidden, size.heads * size.head_dim, size.kv_heads * size.head_dim

    def matrix(rows: int, columns: int, deviation: float | None = None) -> torch.Tensor:
        return torch.randn(rows, columns, generator=draw) * (deviation or 1 / math.sqrt(columns))

    embedding = matrix(vocabulary, hidden, 1.0)
    tensors = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding * 0.02,  # as if they were tied, so that copying a word is soon learnt
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(size.layers):
        name = f"model.layers.{layer}"
        for side, rows in (("q", query), ("k", key), ("v", key)):
            tensors[f"{name}.self_attn.{side}_proj.weight"] = matrix(rows, hidden)
            tensors[f"{name}.self_attn.{side}_proj.bias"] = torch.zeros(rows)
        tensors[f"{name}.self_attn.o_proj.weight"] = matrix(hidden, query)
        tensors[f"{name}.mlp.gate_up_proj.weight"] = matrix(2 * size.ffn, hidden)
        tensors[f"{name}.mlp.down_proj.weight"] = matrix(hidden, size.ffn)
        for norm, value in NORMS.items():
            tensors[f"{name}.{norm}.weight"] = torch.full((hidden,), value)
    return tensors


def write_tiny(path: Path, words: Sequence[str], *, size: Size | None = None, seed: int = 0) -> Path:
    """The whole model directory, as one would download it."""
    size = size or Size()
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(words)
    special = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()}
    vocabulary = math.ceil(tokenizer.get_vocab_size() / 64) * 64
    tokenizer.save(str(path / "tokenizer.json"))
    save_file(weights(size, vocabulary, seed), path / "model.safetensors", metadata={"format": "pt"})
    settings = config(size, vocabulary, special)
    tokenizer_config = {
        "additional_special_tokens": list(SPECIAL),
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        "model_max_length": settings["max_position_embeddings"],
        "pad_token": "<|endoftext|>",
        "padding_side": "left",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    generation = {"eos_token_id": settings["eos_token_id"], "pad_token_id": settings["pad_token_id"]}
    _write_json(path / "config.json", settings)
    _write_json(path / "tokenizer_config.json", tokenizer_config)
    _write_json(path / "generation_config.json", generation)
    return path


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
