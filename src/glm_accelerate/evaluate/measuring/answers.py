"""A model's answers to the prompts of held-out samples, and their scores.

samples -split-> prompts -generate-> answers -Grader (its own process)-> scores -> means with intervals
Ranks that hold the whole model each answer a share.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from glm_accelerate.evaluate.measuring.exam import Exam
from glm_accelerate.evaluate.measuring.grade import Grader
from glm_accelerate.evaluate.measuring.losses import split
from glm_accelerate.evaluate.measuring.text import ROUGE
from glm_accelerate.evaluate.protocol.messages import Prediction
from glm_accelerate.evaluate.statistics.intervals import Interval, mean_interval, rate_interval
from glm_accelerate.generate.answer import generate
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.parallel.ranks import ALONE, Ranks
from glm_accelerate.runtime.errors import UserError

Watch = Callable[[str, int, int], None]  # what, how many are done, of how many
Share = tuple[Sequence[tuple[int, str, Mapping[str, float]]], Sequence[str]]  # a rank's scores, failures


@dataclass(frozen=True, slots=True)
class Answers:
    """Predictions in the exam's order, the mean of each metric over them, and why metrics are missing."""

    predictions: tuple[Prediction, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    intervals: Mapping[str, Interval] = field(default_factory=dict[str, Interval])
    failures: tuple[str, ...] = ()


def answer_prompts(model: Decoder, exam: Exam, count: int, watch: Watch, ranks: Ranks = ALONE) -> Answers:
    """Answers to the first `count` samples of the exam that have a prompt and a reference. Each of `ranks`
    answers its share, and all return the same.
    """

    def text(ids: Sequence[int]) -> str:
        """Special tokens are shown, so that one too many makes an answer wrong."""
        return exam.tokenizer.decode(ids, skip_special=False)

    cases = [split(exam.held_out[int(number)], exam.stops) for number in exam.order[:count]]
    complete = [(place, case) for place, case in enumerate(cases) if case is not None]
    if not complete:
        raise UserError("no held-out sample has a question and an answer", cure="evaluate.metrics: [loss]")
    prompts = [prompt for _, (prompt, _) in complete]
    references = [text(reference) for _, (_, reference) in complete]

    def answer(mine: range) -> Share:
        answers: dict[int, str] = {}
        with Grader(exam.metrics) as grader:

            def grade(index: int, tokens: list[int]) -> None:
                number = mine[index]
                answers[number] = text(tokens)
                grader.put(number, references[number].strip(), answers[number].strip())
                watch("answers", len(answers), len(mine))

            own = [prompts[number] for number in mine]
            generate(model, own, stops=exam.stops, max_new_tokens=exam.max_new_tokens, on_answer=grade)
            scores, failures = grader.scores(), grader.failures()
        return [(number, answers[number], scores[number]) for number in mine], failures

    shares = _gather(answer, range(ranks.rank, len(complete), ranks.count), ranks)
    scored = sorted(each for share, _ in shares for each in share)
    failures = tuple(dict.fromkeys(failure for _, failures in shares for failure in failures))
    computed = set[str].intersection(*(set(scores) for _, _, scores in scored))  # metrics that never failed
    predictions = tuple(
        Prediction(
            text(prompts[number]),
            references[number],
            answer,
            {name: score for name, score in scores.items() if name in computed},
        )
        for number, answer, scores in scored
    )
    metrics, intervals = _summary(exam, count, [place for place, _ in complete], predictions)
    return Answers(predictions, metrics, intervals, failures)


def _gather(answer: Callable[[range], Share], mine: range, ranks: Ranks) -> list[Share]:
    """Every rank's share. If one fails, all learn of it in step, and fail."""
    share: Share = [], []
    try:
        share = answer(mine) if mine else share
    except Exception as error:
        ranks.gather([str(error), share])  # the others wait, whatever the error is
        raise
    gathered = ranks.gather([None, share])
    for rank, (reason, _) in enumerate(gathered):
        if reason is not None:
            raise UserError(f"rank {rank} could not answer its share: {reason}")
    return [share for _, share in gathered]


def _summary(
    exam: Exam, count: int, places: Sequence[int], predictions: Sequence[Prediction]
) -> tuple[dict[str, float], dict[str, Interval]]:
    """The mean of each metric and its interval. `places`: the predictions' indices among the samples."""
    metrics: dict[str, float] = {}
    intervals: dict[str, Interval] = {}
    for name in predictions[0].scores:
        values_N = np.full(count, np.nan)
        values_N[places] = [prediction.scores[name] for prediction in predictions]
        if name == "exact_match":
            right, total = int(np.nansum(values_N)), len(places) + len(exam.order) - count
            metrics[name], interval = right / len(places), rate_interval(right, len(places), total)
        else:
            scale = 100.0 if name in ROUGE else 1.0
            metrics[name], interval = mean_interval(values_N, exam.strata, len(exam.order), scale=scale)
        if interval is not None:
            intervals[name] = interval
    return metrics, intervals
