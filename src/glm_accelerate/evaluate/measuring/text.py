"""BLEU-4 and ROUGE-1/2/L of an answer over the words that jieba cuts, Chinese or English: to the last digit
what GLM-4's fine-tune script gets from nltk and rouge_chinese for two texts. Their oddities are kept so that
figures compare; an empty answer scores 0 where theirs raises.
"""

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec

from glm_accelerate.runtime.errors import UserError

Words = Sequence[str]
Cut = Callable[[str], list[str]]

# A sentence ends here, if anything but a closing quotation mark follows. It matters for blank lines alone.
ENDED = re.compile(r"([。！？?]|\.{6})([^”’])")


def word_cutter() -> Cut:
    """jieba with its own dictionary, read again (a second): the copy that jieba caches in the machine's
    temporary folder could be anybody's, and jieba would unmarshal it.
    """
    require_jieba()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of invalid escapes in its source, and of pkg_resources
        import jieba  # pyright: ignore[reportMissingTypeStubs]
    cutter = jieba.Tokenizer()
    cutter.FREQ, cutter.total = cutter.gen_pfdict(cutter.get_dict_file())
    cutter.initialized = True
    return cutter.lcut


def require_jieba() -> None:
    """BLEU and ROUGE need it."""
    if find_spec("jieba") is None:
        cure = "pip install 'glm-accelerate[metrics]', or evaluate.metrics without bleu and rouge"
        raise UserError("bleu and rouge need the package jieba, which cuts Chinese into words", cure=cure)


def bleu_4(reference: Words, answer: Words) -> float:
    """From 0 to 1. The first order without a match counts as half a match, the next as a quarter, and so on
    (method 3 of Chen and Cherry, 2014). Blanks count as words.
    """
    logs: list[float] = []
    share = 1.0
    for order in range(1, 5):
        grams = Counter(_grams(answer, order))
        matches = (grams & Counter(_grams(reference, order))).total()
        if not matches:
            if order == 1:
                return 0.0
            share /= 2
        logs.append(0.25 * math.log((matches or share) / max(1, grams.total())))
    brevity = 1.0 if len(answer) > len(reference) else math.exp(1 - len(reference) / len(answer))
    return brevity * math.exp(math.fsum(logs))


def rouge_words(words: Words) -> list[str]:
    """Words without blanks, except that a blank line between others is a word (as it is in rouge_chinese)."""
    lines = ENDED.sub(r"\1\n\2", " ".join(words)).rstrip().split("\n")
    return [word for line in lines if line for word in line.split() or [""]]


def rouge_n(reference: Words, answer: Words, order: int) -> float:
    """F1 of the runs of `order` words, each counted once, from 0 to 1."""
    answered, expected = set(_grams(answer, order)), set(_grams(reference, order))
    return _f1(len(answered & expected), len(expected), len(answered))


def rouge_l(reference: Words, answer: Words) -> float:
    """F1 of the longest common subsequence, from 0 to 1."""
    return _f1(common(reference, answer), len(reference), len(answer))


def common(left: Words, right: Words) -> int:
    """Length of the longest common subsequence. A row of its table is one large integer, whose zero bits mark
    where the row grows (Hyyro, 2004): two thousand words take milliseconds, not seconds.
    """
    places: dict[str, int] = {}
    for at, word in enumerate(left):
        places[word] = places.get(word, 0) | 1 << at
    every = (1 << len(left)) - 1
    row = every
    for word in right:
        met = row & places.get(word, 0)
        row = (row + met | row - met) & every
    return len(left) - row.bit_count()


def text_scores(names: Sequence[str], reference: str, answer: str, cut: Cut) -> dict[str, float]:
    """The metrics in `names` on the stock script's scales: BLEU 0 to 1, ROUGE 0 to 100, four decimals."""
    cuts = cut(reference.strip()), cut(answer.strip())
    scores = {"bleu": bleu_4(*cuts)} if "bleu" in names else {}
    words = rouge_words(cuts[0]), rouge_words(cuts[1])
    for name in ROUGE:
        if name in names:
            scores[name] = round(100 * ROUGE[name](*words), 4)
    return scores


ROUGE: Mapping[str, Callable[[Words, Words], float]] = {
    "rouge_1": lambda reference, answer: rouge_n(reference, answer, 1),
    "rouge_2": lambda reference, answer: rouge_n(reference, answer, 2),
    "rouge_l": rouge_l,
}


def _grams(words: Words, order: int) -> list[tuple[str, ...]]:
    return list(zip(*(words[start:] for start in range(order)), strict=False))


def _f1(matches: int, expected: int, answered: int) -> float:
    recall = matches / expected if expected else 0.0
    precision = matches / answered if answered else 0.0
    return 2.0 * (precision * recall / (precision + recall + 1e-8))
