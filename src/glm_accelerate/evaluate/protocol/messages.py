"""What trainer and evaluators exchange: requests and results, as files in evals/ of a run.

<step>-<exam>-<attempt>.asked.json, .json, .items.json   request; result, never NaN; each sample's loss
<step>-<exam>-<attempt>.predictions.jsonl                one question a line: prompt, answer, scores
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import Field, TypeAdapter

from glm_accelerate.data.strict_json import parse
from glm_accelerate.evaluate.statistics.decide import Status
from glm_accelerate.evaluate.statistics.intervals import Interval, SampleLosses
from glm_accelerate.evaluate.statistics.samples import Verdict
from glm_accelerate.runtime.errors import UserError

FOLDER = "evals"  # in a run's directory
STEM = re.compile(r"(0|[1-9][0-9]{0,17})-([0-9a-f]{8})-(0|[1-9][0-9]{0,8})", re.ASCII)
EXAM_ID = "plan"  # the name of the field `exam_id` in files

ExamId = Annotated[str, Field(alias=EXAM_ID)]


def stem_of(step: int, exam_id: str, attempt: int) -> str:
    """The name that all files of one evaluation begin with."""
    return f"{step}-{exam_id}-{attempt}"


def parse_stem(stem: str) -> tuple[int, str, int] | None:
    """Step, exam and attempt; None if it is no such name."""
    match = STEM.fullmatch(stem)
    return None if match is None else (int(match[1]), match[2], int(match[3]))


@dataclass(frozen=True, slots=True)
class _Named:
    """What names an evaluation: its step, its exam, and the attempt at the run that requested it."""

    step: int
    exam_id: ExamId
    attempt: int

    @property
    def stem(self) -> str:
        return stem_of(self.step, self.exam_id, self.attempt)


@dataclass(frozen=True, slots=True)
class Request(_Named):
    """One evaluation that the trainer wants. An evaluator computes the id of its own exam and compares."""

    weights: str  # a snapshot or a checkpoint, relative to the run
    against: str | None = None  # stem of the result to compare with
    against_weights: str | None = None  # the weights of that one
    whole: bool = False  # on all held-out samples: a finalist
    at_most: int | None = None  # samples, where a budget pays for no more


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two steps on the same samples."""

    step: int  # compared with
    stem: str
    difference: float  # of the losses; below 0: the new one is better
    interval: Interval  # of the difference; over all looks together it is wrong in at most 5 % of cases
    verdict: Verdict
    look: int  # after which the verdict was reached
    looks: int  # that were declared


@dataclass(frozen=True, slots=True)
class EvaluationResult(_Named):
    """One evaluation of one step. Results compare only if they are of the same exam."""

    status: Status
    loss: float | None = None
    ci95: Interval | None = None  # of the loss
    samples: int = 0  # whose loss was measured
    asked: int = 0  # samples whose prompts were given to the model; not all samples have one
    answers: int = 0  # that were generated and scored
    total: int = 0  # held out in all
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    intervals: Mapping[str, Interval] = field(default_factory=dict[str, Interval])  # of the metrics
    seconds: float = 0.0
    against: Comparison | None = None
    reason: str | None = None  # why it is not done
    by: Mapping[str, str] = field(default_factory=dict[str, str])  # host, device, dtype, versions

    @property
    def fewest(self) -> int:
        """The smallest number of samples behind any figure."""
        return min(filter(None, (self.samples, self.asked)), default=0)

    def event(self) -> dict[str, object]:
        """The fields of an `eval` event."""
        names = ["step", "status", "loss", "ci95", "samples", "answers", "total", "metrics", "seconds"]
        fields: dict[str, object] = asdict(self)
        optional = [name for name in ("reason", "against") if fields[name] is not None]
        return {name: fields[name] for name in [*names, *optional]}


@dataclass(frozen=True, slots=True)
class Prediction:
    """One prompt as the model read it, the expected answer, the model's answer, and each metric of that."""

    prompt: str
    reference: str
    answer: str
    scores: dict[str, float]


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that one evaluation publishes."""

    result: EvaluationResult
    losses: SampleLosses | None = None
    predictions: Sequence[Prediction] = ()
    baseline_losses: SampleLosses | None = None  # of the step compared with, if more samples were measured


class Examiner(Protocol):
    """Whoever can answer a run's requests: a GLM with its exam, or a user's own module."""

    @property
    def exam_id(self) -> str: ...

    def examine(self, request: Request, run: str, baseline: SampleLosses | None) -> Findings:
        """`baseline`: the losses of the step to compare with."""
        ...

    def smaller(self) -> bool:
        """After it ran out of memory: whether it can try again with less."""
        ...


Message = TypeVar("Message", Request, EvaluationResult)


def exam_id_of(content: Mapping[str, object]) -> str:
    """A short digest of an exam's content."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def full_exam_id(exam_id: str) -> str:
    """The id of the same exam on all samples: its results compare with none that were sampled."""
    return exam_id_of({"all samples of": exam_id})


def failure(request: Request, status: Status, reason: str) -> EvaluationResult:
    """The result of a request that was not evaluated."""
    return EvaluationResult(request.step, request.exam_id, request.attempt, status, reason=reason)


def to_json(message: Request | EvaluationResult) -> dict[str, Any]:
    """The fields as they are written to files."""
    return {EXAM_ID if name == "exam_id" else name: value for name, value in asdict(message).items()}


def with_finite_numbers(result: EvaluationResult) -> EvaluationResult:
    """What can be written and compared: a loss that is not finite makes an evaluation fail, such a metric is
    left out, and either way the reason says so.
    """
    loss, reason = result.loss, result.reason
    metrics = {name: value for name, value in result.metrics.items() if _finite(value)}
    if odd := sorted(result.metrics.keys() - metrics.keys()):
        reason = reason or f"left out, as no finite numbers: {', '.join(odd)}"
    intervals = {name: ends for name, ends in result.intervals.items() if name in metrics and _finite(*ends)}
    result = replace(result, metrics=metrics, intervals=intervals, reason=reason)
    against, ci95 = result.against, result.ci95
    if loss is not None and not _finite(loss):
        reason, ci95, against = f"the held-out loss is {loss}", None, None
        result = replace(result, status="failed", loss=None, reason=reason)
    return replace(
        result,
        ci95=ci95 if ci95 is not None and _finite(*ci95) else None,
        against=against if against is not None and _finite(against.difference, *against.interval) else None,
    )


def _finite(*values: object) -> bool:
    """Whether each is a number that JSON has. A user's own metric may return anything."""
    return all(
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        for value in values
    )


def parse_request(text: str, where: Path) -> Request:
    """A request's file. Its weights have to lie in the run."""
    request = _parse(text, Request, where)
    for path in (request.weights, request.against_weights):
        if path is not None and (PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts):
            raise UserError(f"asks for weights outside the run: {path!r}", where=where, cure="move it away")
    return request


def parse_result(text: str, where: Path) -> EvaluationResult:
    """A result's file, of any version so far."""
    return _parse(text, EvaluationResult, where)


def _parse(text: str, kind: type[Message], where: Path) -> Message:
    """Strict JSON, each field of its own type, under its own name. Fields of newer versions are ignored."""
    try:
        parse(text)  # refuses what the schema would not: the same name twice, NaN
        message: Message = _schema(kind).validate_json(text, strict=True)
    except ValueError as error:
        what = "; ".join(line.strip() for line in str(error).splitlines()[:3])
        raise UserError(f"not of an evaluation: {what}", where=where, cure="move it away") from error
    if not where.name.startswith(f"{message.stem}."):
        raise UserError(f"says that it is {message.stem}", where=where, cure="move it away")
    return message


@cache  # it takes milliseconds to make
def _schema(kind: type[Request | EvaluationResult]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
