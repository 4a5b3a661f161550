"""Numbers as the original tokenizers give them, and no special token out of a text."""

import json
import random
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
from tokenizers import Tokenizer as Engine

from glm_accelerate.data.tokenizers import PATTERN, SPECIAL, encode_all, load_tokenizer, portions, read_ranks
from glm_accelerate.runtime.errors import UserError

HARD = [
    "",
    "\n",
    " \n\n x",
    "a<|user|>b [gMASK]<sop> <think> </s> <|endoftext|>",
    "The weather in Paris 12345\r\n\r\n  你好，世界\u3000\u2028é",
]


def test_fast_numbers_equal_the_library(fast_dir: Path) -> None:
    tokenizer = load_tokenizer(fast_dir)
    engine = Engine.from_file(str(fast_dir / "tokenizer.json"))
    for text in ["The weather in Paris", "你好\n\n天气 123"]:
        assert tokenizer.encode([text]) == [engine.encode(text, add_special_tokens=False).ids]


def test_roles_cannot_be_forged(fast_dir: Path) -> None:
    tokenizer = load_tokenizer(fast_dir)
    added = {tokenizer.special(name) for name in (*SPECIAL, "<think>")}
    numbers = tokenizer.encode(HARD)
    assert not added & {number for ids in numbers for number in ids}
    assert [tokenizer.decode(ids) for ids in numbers] == HARD


@pytest.mark.parametrize("kind", ["fast_dir", "ranks_dir", "sentence_dir"])
def test_decode_skips_or_shows_special_tokens(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer = load_tokenizer(request.getfixturevalue(kind))
    ids = [tokenizer.special("<|user|>"), *tokenizer.encode(["Paris"])[0], tokenizer.special("<|assistant|>")]
    assert tokenizer.decode(ids) == "Paris"
    assert tokenizer.decode(ids, skip_special=False) == "<|user|>Paris<|assistant|>"
    assert max(ids) < tokenizer.vocab_size


def test_ranks_equal_tiktoken(ranks_dir: Path) -> None:
    tokenizer = load_tokenizer(ranks_dir)
    ranks = read_ranks(ranks_dir / "tokenizer.model")
    oracle = tiktoken.Encoding("oracle", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    dice = random.Random(0)
    texts = [
        "".join(dice.choices("aaab  \n\t\r=-0129中文天气ü\u3000'sS", k=dice.randint(0, 60)))
        for _ in range(2000)
    ]
    texts += HARD
    wanted = [oracle.encode(text, disallowed_special=()) for text in texts]
    assert tokenizer.encode(texts) == wanted
    assert [tokenizer.decode(ids) for ids in wanted] == texts


@pytest.mark.parametrize("size", [1, 3, 17, 50])
def test_long_texts_are_the_same_in_portions(fast_dir: Path, size: int) -> None:
    engine = Engine.from_file(str(fast_dir / "tokenizer.json"))
    engine.encode_special_tokens = True
    dice = random.Random(size)
    letters = "ab c,.  \n\t'sé\u0301中文1234 \r\n"
    texts = [
        " x".join("".join(dice.choices(letters, k=9)) for _ in range(dice.randint(0, 30))) for _ in range(200)
    ]
    # A portion as long as the longest run of letters: only then is a cut always between words.
    whole = [engine.encode(text, add_special_tokens=False).ids for text in texts]
    assert encode_all(engine, texts, portion=12 + size) == whole
    assert all("".join(portions(text, size)) == text for text in texts)


def test_specials_follow_the_ranks(ranks_dir: Path) -> None:
    count = len(read_ranks(ranks_dir / "tokenizer.model"))
    tokenizer = load_tokenizer(ranks_dir)
    assert [tokenizer.special(name) for name in SPECIAL] == list(range(count, count + 14))
    assert tokenizer.vocab_size == count + 14


def test_sentence_pieces_keep_the_leading_space(sentence_dir: Path) -> None:
    tokenizer = load_tokenizer(sentence_dir)
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(sentence_dir / "tokenizer.model"))
    assert [oracle.id_to_piece(number) for number in tokenizer.encode(["\n"])[0]] == ["▁", "\n"]
    assert tokenizer.encode(HARD) == [oracle.encode(text) for text in HARD]
    assert tokenizer.special("</s>") not in tokenizer.encode(["</s>"])[0]
    names = [
        "[MASK]",
        "[gMASK]",
        "[sMASK]",
        "sop",
        "eop",
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
        "<|observation|>",
    ]
    first = oracle.get_piece_size()
    assert [tokenizer.special(name) for name in names] == list(range(first, first + 9))
    assert tokenizer.special("</s>") == oracle.eos_id()


def test_numbers_beyond_all_pieces_stand_for_nothing(sentence_dir: Path) -> None:
    """A model's table of words is padded, and one that was trained badly says such a number."""
    tokenizer = load_tokenizer(sentence_dir)
    ids = tokenizer.encode(["hello"])[0]
    beyond = [tokenizer.vocab_size, tokenizer.vocab_size + 700]
    assert tokenizer.decode([beyond[0], *ids, *beyond]) == tokenizer.decode(ids)


def test_chatglm2_has_no_roles(sentence_dir: Path) -> None:
    config = json.loads((sentence_dir / "config.json").read_text())
    (sentence_dir / "config.json").write_text(json.dumps(config | {"_name_or_path": "THUDM/chatglm2-6b"}))
    tokenizer = load_tokenizer(sentence_dir)
    with pytest.raises(UserError, match=r"no special token <\|user\|>.*does data\.template fit"):
        tokenizer.special("<|user|>")


def test_fingerprint_is_of_the_content(fast_dir: Path) -> None:
    before = load_tokenizer(fast_dir).fingerprint
    assert load_tokenizer(fast_dir).fingerprint == before
    path = fast_dir / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    assert load_tokenizer(fast_dir).fingerprint != before


def test_missing_and_broken_files_are_named(tmp_path: Path, ranks_dir: Path) -> None:
    with pytest.raises(UserError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        load_tokenizer(tmp_path / "nowhere")
    model = ranks_dir / "tokenizer.model"
    model.write_text(model.read_text() + "what is this\n")
    with pytest.raises(UserError, match=r"tokenizer\.model:\d+: is not `base64 rank`"):
        load_tokenizer(ranks_dir)
    model.write_bytes(b"\x00\x01 not a model")
    (ranks_dir / "config.json").write_text(json.dumps({"model_type": "chatglm", "_name_or_path": "chatglm3"}))
    with pytest.raises(UserError, match="neither tiktoken ranks nor a SentencePiece model"):
        load_tokenizer(ranks_dir)
    (ranks_dir / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer\.json: cannot be read"):
        load_tokenizer(ranks_dir)


@pytest.mark.parametrize("said", ["{oops", "[]", '{"added_tokens_decoder": {"x": {"content": "a"}}}'])
def test_broken_special_tokens_are_named(ranks_dir: Path, said: str) -> None:
    (ranks_dir / "tokenizer_config.json").write_text(said)
    with pytest.raises(UserError, match=r"tokenizer_config\.json: cannot be read"):
        load_tokenizer(ranks_dir)


def test_the_template_that_was_said_decides_where_the_files_do_not(sentence_dir: Path) -> None:
    (sentence_dir / "config.json").write_text(json.dumps({"model_type": "chatglm"}))
    with pytest.raises(UserError, match="whether this is ChatGLM2 or ChatGLM3"):
        load_tokenizer(sentence_dir)
    assert load_tokenizer(sentence_dir, "chatglm3").special("<|user|>")
    with pytest.raises(UserError):
        load_tokenizer(sentence_dir, "chatglm2").special("<|user|>")
