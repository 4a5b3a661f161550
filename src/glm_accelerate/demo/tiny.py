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

# In the order of the published vocabulary, where their numbers follow the last word.
SPECIAL_TOKENS = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>",
    "<|assistant|>", "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>",
    "<|end_of_video|>",
)  # fmt: skip
STOPS = ("<|endoftext|>", "<|user|>", "<|observation|>")

# Where GLM-4 cuts text before it merges bytes: words with what stands before them, up to three digits,
# punctuation, line ends, spaces.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# How GLM-4-0414 writes a conversation: tools in a system turn of their own, a call as name and arguments.
CHAT_TEMPLATE = """\
[gMASK]<sop>
{%- if tools -%}
<|system|>
# 可用工具
{% for tool in tools %}
    {%- set function = tool.function if tool.get("function") else tool %}

## {{ function.name }}

{{ function | tojson(indent=4, ensure_ascii=False) }}
在调用上述函数时，请使用 Json 格式表示调用的参数。
{%- endfor %}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == "user" %}<|user|>
{{ message.content }}
    {%- elif message.role == "system" %}<|system|>
{{ message.content }}
    {%- elif message.role == "observation" %}<|observation|>
{{ message.content }}
    {%- elif message.role == "assistant" %}<|assistant|>
{%- if message.metadata %}{{ message.metadata }}{% endif %}
{{ message.content }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}
"""


@dataclass(frozen=True, slots=True)
class Size:
    """How big the tiny one is."""

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 384


def build_tokenizer(words: Sequence[str]) -> Tokenizer:
    """A byte-level BPE in which each of these words is one token; everything else is spelt in bytes."""
    tokenizer = Tokenizer(BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of_words])  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = BpeTrainer(
        vocab_size=4096,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(words, trainer=trainer)
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS]
    )
    return tokenizer
