"""What the stock script computes of one text, with the packages that it uses: nothing here is ours."""

import warnings
from collections.abc import Iterable
from statistics import fmean

from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
from rouge_chinese import Rouge

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import jieba

NAMES = ("bleu", "rouge_1", "rouge_2", "rouge_l")


def ready() -> None:
    """The dictionary, read once a run and not once an evaluation."""
    jieba.setLogLevel("ERROR")
    jieba.initialize()


def scores_of(reference: str, answer: str) -> dict[str, float]:
    """BLEU from 0 to 1, ROUGE from 0 to 100. A Rouge of its own for each, as there; empty texts raise."""
    answer_words, reference_words = list(jieba.cut(answer)), list(jieba.cut(reference))
    (rouge,) = Rouge().get_scores(" ".join(answer_words), " ".join(reference_words))
    smoothing = SmoothingFunction().method3
    bleu = sentence_bleu([reference_words], answer_words, smoothing_function=smoothing)
    return {
        "bleu": float(bleu),
        **{name.replace("-", "_"): round(score["f"] * 100, 4) for name, score in rouge.items()},
    }


def means(scores: Iterable[dict[str, float]]) -> dict[str, float]:
    """Each metric over all texts."""
    kept = list(scores)
    return {name: fmean(score[name] for score in kept) for name in NAMES}
