"""The model of the race: a small GLM-4-0414 with seeded random weights and a tokenizer trained on the data.

python -m benchmarks.race.prepare_model --data TRAIN.jsonl --out DIR [--vocab 8000] [--seed 0]

A directory in Hugging Face form, so that both sides read the same files. 34 M parameters with a
vocabulary of 8,000; with GLM-4's full 151,552 the tokenizer is the same and the rest of the rows is idle.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import Glm4Config, Glm4ForCausalLM, PreTrainedTokenizerFast

WORDS = 8_000  # of the tokenizer, special ones included
SPECIALS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
)
# How GLM-4 cuts text before merging bytes: contractions, words, up to three digits, marks, white space.
CUTS = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
# GLM-4-0414's format: tools first, then system turns, then the rest; the model writes the newline after
# <|assistant|> itself.
CHAT_TEMPLATE = """\
[gMASK]<sop>
{%- if tools %}{{ '<|system|>\\n# 可用工具' }}
{%- for tool in tools %}{% set function = tool.function if tool.function is defined else tool %}
{{- '\\n\\n## ' + function.name + '\\n\\n' + function | tojson(indent=4, ensure_ascii=False) }}
{{- '\\n在调用上述函数时，请使用 Json 格式表示调用的参数。' }}
{%- endfor %}{% endif %}
{%- for message in messages if message.role == 'system' %}{{ '<|system|>\\n' + message.content }}{% endfor %}
{%- for message in messages if message.role in ('user', 'assistant', 'observation') %}
{{- '<|' + message.role + '|>' + (message.metadata or '') + '\\n' + message.content }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


@dataclass(frozen=True)
class Shape:
    """How large the model is."""

    hidden: int = 512
    layers: int = 8
    ffn: int = 1712
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64


SMALL = Shape()
TINY = Shape(hidden=32, layers=2, ffn=48, heads=4, kv_heads=2, head_dim=8)  # for tests


def texts(data: Path) -> Iterator[str]:
    """What is said in a file of conversations."""
    with data.open(encoding="utf-8") as lines:
        for line in lines:
            yield from (message["content"] for message in json.loads(line)["messages"])


def train_tokenizer(data: Path, words: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE cut as GLM-4 cuts; the special tokens get the highest numbers, in GLM-4's order."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CUTS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=words - len(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts(data), trainer)
    bpe.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in SPECIALS])
    prefix = [(name, bpe.token_to_id(name)) for name in ("[gMASK]", "<sop>")]
    bpe.post_processor = processors.TemplateProcessing(
        single="[gMASK] <sop> $A", pair="[gMASK] <sop> $A $B", special_tokens=prefix
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIALS),
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=32_768,
        chat_template=CHAT_TEMPLATE,
    )


def random_model(tokenizer: PreTrainedTokenizerFast, vocab: int, shape: Shape, seed: int) -> Glm4ForCausalLM:
    numbers = tokenizer.get_vocab()
    stops = [numbers[name] for name in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    config = Glm4Config(
        vocab_size=max(vocab, len(tokenizer)),
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        intermediate_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=1e-5,
        attention_bias=True,
        max_position_embeddings=32_768,
        pad_token_id=stops[0],
        eos_token_id=stops,
    )
    torch.manual_seed(seed)
    return Glm4ForCausalLM(config).bfloat16()


def prepare_model(data: Path, out: Path, vocab: int, seed: int = 0, shape: Shape = SMALL) -> None:
    tokenizer = train_tokenizer(data, min(vocab, WORDS))
    model = random_model(tokenizer, vocab, shape, seed)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    # Written last: a directory without it is not complete.
    count = sum(p.numel() for p in model.parameters())
    made = {"parameters": count, "data": data.name, "vocab": vocab, "seed": seed}
    (out / "made.json").write_text(json.dumps(made) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the model of the race.")
    parser.add_argument("--data", type=Path, required=True, help="JSONL with messages: trains the tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="the directory to write")
    parser.add_argument("--vocab", type=int, default=WORDS, help="rows of the embedding")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a model for tests")
    given = parser.parse_args()
    prepare_model(given.data, given.out, given.vocab, given.seed, TINY if given.tiny else SMALL)


if __name__ == "__main__":
    main()
