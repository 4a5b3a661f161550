import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Glm4ForCausalLM

from glm_accelerate.data.templates import detect_template, get_template
from glm_accelerate.data.tokenizers import SPECIAL, load_tokenizer
from glm_accelerate.data.types import Message
from glm_accelerate.demo.tiny import Size, write_tiny
from glm_accelerate.models.weights import load_model

SMALL = Size(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=48)
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "你好 <|user|>"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "1234"},
]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "model", ["hello", " world", "你好"], size=SMALL)


def test_transformers_opens_it_and_computes_what_our_model_does(tiny: Path) -> None:
    theirs, found = Glm4ForCausalLM.from_pretrained(tiny, dtype=torch.float32, output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours = load_model(tiny, dtype=torch.float32)
    tokens = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)


def test_the_weights_are_a_function_of_the_seed(tmp_path: Path) -> None:
    a, b, c = (
        load_file(write_tiny(tmp_path / name, ["x"], size=SMALL, seed=seed) / "model.safetensors")
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])


def test_the_template_is_recognised_and_equals_ours_token_for_token(tiny: Path) -> None:
    assert detect_template(tiny) == "glm4-0414"
    theirs = AutoTokenizer.from_pretrained(tiny)
    ours = load_tokenizer(tiny)
    messages = [Message(turn["role"], turn["content"]) for turn in TALK[1:]]
    pieces = get_template("glm4-0414").render(messages, generation_prompt=True)
    text = theirs.apply_chat_template(TALK[1:], add_generation_prompt=True, tokenize=False)
    assert text == "".join(piece.text for piece in pieces)
    tokens = theirs.apply_chat_template(TALK[1:], add_generation_prompt=True)["input_ids"]
    written = (
        [ours.special(piece.text)] if piece.special else ours.encode([piece.text])[0] for piece in pieces
    )
    assert tokens == [token for part in written for token in part]


def test_special_tokens_follow_the_words_and_no_text_makes_one(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    numbers = [tokenizer.special(name) for name in SPECIAL]
    assert numbers == list(range(numbers[0], numbers[0] + len(SPECIAL)))
    config = json.loads((tiny / "config.json").read_text())
    assert config["eos_token_id"] == [
        tokenizer.special(n) for n in ("<|endoftext|>", "<|user|>", "<|observation|>")
    ]
    assert config["vocab_size"] % 64 == 0
    assert config["vocab_size"] > numbers[-1]
    assert not set(tokenizer.encode([TALK[0]["content"]])[0]) & set(numbers)


def test_each_word_is_one_token_and_anything_else_is_spelt(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    assert [len(tokens) for tokens in tokenizer.encode(["hello", " world", "你好", "hello world"])] == [
        1,
        1,
        1,
        2,
    ]
    for text in ("Ünïcödé 🙂 \x00\r\n\t", "  two  spaces", "123456", "re-read"):
        assert tokenizer.decode(tokenizer.encode([text])[0]) == text
