"""What a model says to the prompts of held-out samples, and how good that is.

samples -split-> prompts -generate-> answers -Grader (processes of its own)-> scores -> means with intervals
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from glm_accelerate.evaluate.exam import Exam, Prediction
from glm_accelerate.evaluate.grade import Grader
from glm_accelerate.evaluate.intervals import mean_interval, rate_interval
from glm_accelerate.evaluate.results import Interval
from glm_accelerate.evaluate.score import split
from glm_accelerate.generate.answer import generate
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.runtime.errors import UserError

Watch = Callable[[str, int, int], None]  # what, how many are done, of how many


@dataclass(frozen=True, slots=True)
class Answers:
    """Predictions in the exam's order, the mean of each metric over them, and why one is missing."""

    predictions: tuple[Prediction, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    intervals: Mapping[str, Interval] = field(default_factory=dict[str, Interval])
    troubles: tuple[str, ...] = ()


def ask(model: Decoder, exam: Exam, count: int, watch: Watch) -> Answers:
    """To the first `count` samples of the exam. What has no question or no answer is left out."""

    def text(ids: Sequence[int]) -> str:
        """Special tokens are shown, so that one too many makes an answer wrong."""
        return exam.tokenizer.decode(ids, skip_special=False)

    cases = [split(exam.held_out[int(number)], exam.stops) for number in exam.order[:count]]
    asked = [(place, case) for place, case in enumerate(cases) if case is not None]
    if not asked:
        raise UserError("no held-out sample has a question and an answer", cure="evaluate.metrics: [loss]")
    references = [text(reference) for _, (_, reference) in asked]
    answers: dict[int, str] = {}
    with Grader(exam.metrics) as grader:

        def take(index: int, tokens: list[int]) -> None:
            answers[index] = text(tokens)
            grader.put(index, references[index].strip(), answers[index].strip())
            watch("answers", len(answers), len(asked))

        prompts = [prompt for _, (prompt, _) in asked]
        generate(model, prompts, stops=exam.stops, max_new_tokens=exam.max_new_tokens, on_answer=take)
        scores, troubles = grader.scores(), tuple(grader.troubles())
    predictions = tuple(
        Prediction(text(prompt), references[index], answers[index], scores[index])
        for index, (_, (prompt, _)) in enumerate(asked)
    )
    metrics, intervals = _summary(exam, count, [place for place, _ in asked], predictions)
    return Answers(predictions, metrics, intervals, troubles)


def _summary(
    exam: Exam, count: int, places: Sequence[int], predictions: Sequence[Prediction]
) -> tuple[dict[str, float], dict[str, Interval]]:
    """The mean of each metric, and its interval; `places`: of the predictions among the samples drawn."""
    metrics: dict[str, float] = {}
    intervals: dict[str, Interval] = {}
    for name in predictions[0].scores:
        values_N = np.full(count, np.nan)
        values_N[places] = [prediction.scores[name] for prediction in predictions]
        metrics[name] = float(np.nanmean(values_N))
        if name == "exact_match":
            right, total = int(np.nansum(values_N)), len(places) + len(exam.order) - count
            intervals[name] = rate_interval(right, len(places), total)
        elif (interval := mean_interval(values_N, exam.strata, len(exam.order))) is not None:
            intervals[name] = interval
    return metrics, intervals
