"""Small real tokenizer files: byte-level BPE with GLM-4's specials, tiktoken ranks, SentencePiece."""

import base64
import io
import json
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from glm_accelerate.data.tokenizers import PATTERN, SPECIAL

WORDS = [
    "The weather in Paris is sunny and warm today, twenty-two degrees.",
    "你好，请问今天北京的天气怎么样？今天北京的气温为 22 摄氏度。",
    'get_weather\n{"city": "Paris", "unit": "celsius"}\n\n## tools\n',
    "aaaa aaaaaa   spaces\t\ttabs\r\nlines 123456 <|user|> </s> [gMASK]",
] * 8


def byte_level(vocabulary: int = 700) -> Tokenizer:
    engine = Tokenizer(BPE(ignore_merges=True))
    cut = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    engine.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    engine.train_from_iterator(WORDS, trainer)
    return engine


@pytest.fixture
def fast_dir(tmp_path: Path) -> Path:
    """GLM-4-0414's kind: tokenizer.json with special tokens, and one added token that is not special."""
    engine = byte_level()
    engine.add_special_tokens(list(SPECIAL))
    engine.add_tokens([AddedToken("<think>", special=False)])
    engine.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "glm4"}))
    return tmp_path


@pytest.fixture
def ranks_dir(tmp_path: Path) -> Path:
    """GLM-4-9B's kind: tokenizer.model with tiktoken ranks."""
    shown = {**{chr(byte): byte for byte in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]}}
    hidden = [byte for byte in range(256) if chr(byte) not in shown]
    shown |= {chr(0x100 + place): byte for place, byte in enumerate(hidden)}
    vocabulary = byte_level(600).get_vocab()
    words = sorted(vocabulary, key=vocabulary.__getitem__)
    tokens = [bytes(shown[char] for char in word) for word in words]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (tmp_path / "tokenizer.model").write_text("\n".join(lines) + "\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "chatglm", "padded_vocab_size": 151552}))
    return tmp_path


@pytest.fixture
def sentence_dir(tmp_path: Path) -> Path:
    """ChatGLM3's kind: tokenizer.model of SentencePiece."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(WORDS), model_writer=model, vocab_size=500, model_type="bpe",
        byte_fallback=True, hard_vocab_limit=False, normalization_rule_name="identity",
        remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    config = {"model_type": "chatglm", "padded_vocab_size": 65024, "_name_or_path": "THUDM/chatglm3-6b"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path
