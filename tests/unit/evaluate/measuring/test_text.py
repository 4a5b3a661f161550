"""BLEU and ROUGE against the packages that the stock script uses, on whatever a model may say."""

import random
import sys
import warnings
from collections.abc import Sequence

import pytest
from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
from rouge_chinese import Rouge

from glm_accelerate.evaluate.measuring import text
from glm_accelerate.evaluate.measuring.text import (
    bleu_4,
    common,
    require_jieba,
    rouge_l,
    rouge_n,
    rouge_words,
    text_scores,
    word_cutter,
)
from glm_accelerate.runtime.errors import UserError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import jieba

NAMES = ("bleu", "rouge_1", "rouge_2", "rouge_l")
CHINESE = [
    "今天",
    "北京",
    "的",
    "天气",
    "怎么样",
    "，",
    "。",
    "！",
    "？",
    "”",
    "’",
    "……",
    "\u3000",
    "了",
    "朝阳区",
]
ENGLISH = ["the", "cat", "sat", " ", "a_b-c", "3.14", "100%", ".", "?", "!", "......", ".......", "A.D.", "'"]
ODD = ["\n", "\n\n", "\r\n", "\t", "\x85", "\u2028", "\x1c", "😀", "\ufffd", "<|user|>", "<|endoftext|>", "",
       "-" * 7, '{"city": "巴黎"}', "......-", "\x00", "é", "ß", "한국어", "。”", "？’", "# 题"]  # fmt: skip


@pytest.fixture(scope="module")
def cut() -> text.Cut:
    return word_cutter()


@pytest.fixture(scope="module")
def stock_cut(tmp_path_factory):
    """jieba as anybody calls it; its cache is not left among everybody's files."""
    jieba.setLogLevel("ERROR")
    cutter = jieba.Tokenizer()
    cutter.tmp_dir = str(tmp_path_factory.mktemp("jieba"))
    return lambda said: list(cutter.cut(said))


def stock(reference: str, answer: str, stock_cut) -> dict[str, float]:
    """The arithmetic of the stock script's compute_metrics for one pair; 0 where it raises."""
    said, right = stock_cut(answer.strip()), stock_cut(reference.strip())
    try:
        rouge = Rouge().get_scores(" ".join(said), " ".join(right))[0]
    except ValueError:
        rouge = {"rouge-1": {"f": 0.0}, "rouge-2": {"f": 0.0}, "rouge-l": {"f": 0.0}}
    found = {name.replace("-", "_"): round(score["f"] * 100, 4) for name, score in rouge.items()}
    bleu = sentence_bleu([right], said, smoothing_function=SmoothingFunction().method3)
    return {"bleu": float(bleu), **found}


def drawn(draw: random.Random, alphabet: Sequence[str]) -> tuple[str, str]:
    """Two texts, often alike."""
    answer = [draw.choice(alphabet) for _ in range(draw.choice((0, 1, 2, 3, 5, 9, 30)))]
    if draw.random() < 0.3:
        return "".join(draw.choice(alphabet) for _ in range(draw.randrange(20))), "".join(answer)
    kept = [draw.choice(alphabet) if draw.random() < 0.1 else word for word in answer if draw.random() < 0.8]
    return "".join(kept), "".join(answer)


@pytest.mark.parametrize(
    "alphabet", [CHINESE, ENGLISH, ODD, CHINESE + ENGLISH + ODD], ids=["chinese", "english", "odd", "mixed"]
)
def test_scores_are_those_of_the_stock_packages(alphabet, cut, stock_cut):
    draw = random.Random(7)
    seen = {name: set() for name in NAMES}
    for _ in range(400):
        reference, answer = drawn(draw, alphabet)
        ours = text_scores(NAMES, reference, answer, cut)
        theirs = stock(reference, answer, stock_cut)
        assert ours == pytest.approx(theirs, abs=1e-9), (reference, answer)
        for name in NAMES:
            seen[name].add(round(ours[name], 3))
    assert min(map(len, seen.values())) > 40  # not all of them 0 or 1


def test_rounding_hides_nothing(cut, stock_cut):
    """F before it is rounded, and words that no jieba cut: any runs of characters without blanks."""
    draw = random.Random(3)
    for _ in range(300):
        left, right = ([draw.choice("abcd。？") for _ in range(draw.randrange(1, 12))] for _ in range(2))
        theirs = Rouge().get_scores(" ".join(left), " ".join(right))[0]
        ours = rouge_words(right), rouge_words(left)
        found = {"rouge-1": rouge_n(*ours, 1), "rouge-2": rouge_n(*ours, 2), "rouge-l": rouge_l(*ours)}
        assert found == pytest.approx({name: score["f"] for name, score in theirs.items()}, abs=1e-9)
        bleu = sentence_bleu([right], left, smoothing_function=SmoothingFunction().method3)
        assert bleu_4(right, left) == pytest.approx(bleu, abs=1e-9)


def test_only_what_is_asked_for(cut):
    assert list(text_scores(("rouge_l",), "好", "好", cut)) == ["rouge_l"]
    assert list(text_scores(("bleu",), "好", "好", cut)) == ["bleu"]


def test_nothing_said_is_worth_nothing(cut):
    nothing = dict.fromkeys(NAMES, 0.0)
    for reference, answer in (("天气很好", ""), ("", "天气很好"), ("", ""), (" \n", "\t"), ("好", "。\n")):
        assert text_scores(NAMES, reference, answer, cut) == pytest.approx(nothing)


def test_the_same_is_worth_all(cut):
    same = text_scores(NAMES, "今天北京天气很好。", "今天北京天气很好。", cut)
    assert same == pytest.approx(
        {"bleu": 1.0, "rouge_1": 100.0, "rouge_2": 100.0, "rouge_l": 100.0}, abs=1e-4
    )


def test_common_is_the_longest_common_subsequence():
    draw = random.Random(1)
    for _ in range(200):
        left, right = ([draw.choice("abc") for _ in range(draw.randrange(9))] for _ in range(2))
        table = [[0] * (len(right) + 1) for _ in range(len(left) + 1)]
        for i, a in enumerate(left):
            for j, b in enumerate(right):
                table[i + 1][j + 1] = table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
        assert common(left, right) == table[-1][-1] == common(right, left)


def test_long_answers_take_no_time():
    """The usual table of 20,000 words by 20,000 would not be filled within a test's minute."""
    draw = random.Random(2)
    left, right = ([draw.choice("abcdefghij") for _ in range(20_000)] for _ in range(2))
    assert 8_000 < common(left, right) < 12_000


def test_without_jieba_the_cure_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", None)
    monkeypatch.setattr(text, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"need the package jieba.*glm-accelerate\[metrics\]"):
        require_jieba()


def test_the_cutter_reads_no_shared_file(tmp_path, monkeypatch, capfd):
    """A cache that others could have written is neither read nor left; and nothing is printed."""
    (tmp_path / "jieba.cache").write_bytes(b"not marshal at all")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert word_cutter()("今天北京天气很好") == ["今天", "北京", "天气", "很", "好"]
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [
        ("jieba.cache", b"not marshal at all")
    ]
    assert capfd.readouterr() == ("", "")
