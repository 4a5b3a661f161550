"""What evaluations are asked and what they found, as files in evals/ of a run: the words of the ledger.

<step>-<plan>-<attempt>.asked.json, .json, .items.json   request; result, never NaN; each sample's loss
<step>-<plan>-<attempt>.predictions.jsonl                one question a line: what it read and said, scores
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Protocol, TypeVar

from pydantic import TypeAdapter

from glm_accelerate.data.strict_json import parse
from glm_accelerate.evaluate.statistics.decide import Status
from glm_accelerate.evaluate.statistics.intervals import Interval, Items
from glm_accelerate.evaluate.statistics.looks import Verdict
from glm_accelerate.runtime.errors import UserError

FOLDER = "evals"  # in a run's directory
SNAPSHOTS = "snapshots"
STEM = re.compile(r"(0|[1-9][0-9]{0,17})-([0-9a-f]{8})-(0|[1-9][0-9]{0,8})", re.ASCII)


def stem_of(step: int, plan: str, attempt: int) -> str:
    """The name that all files of one evaluation begin with."""
    return f"{step}-{plan}-{attempt}"


def parse_stem(stem: str) -> tuple[int, str, int] | None:
    """Step, plan and attempt, if it is such a name at all."""
    match = STEM.fullmatch(stem)
    return None if match is None else (int(match[1]), match[2], int(match[3]))


@dataclass(frozen=True, slots=True)
class Request:
    """One evaluation that is wanted. `plan` names what is asked; whoever evaluates computes it, too."""

    step: int
    plan: str
    attempt: int
    weights: str  # a snapshot or a checkpoint, relative to the run
    against: str | None = None  # stem of the result to compare with
    against_weights: str | None = None  # where that one's weights are
    whole: bool = False  # on all held-out samples: a finalist

    @property
    def stem(self) -> str:
        return stem_of(self.step, self.plan, self.attempt)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two steps on the same samples."""

    step: int  # compared with
    stem: str
    difference: float  # of the losses; below 0: the new one is better
    interval: Interval  # of it; over all looks together it is wrong in at most 5 % of cases
    verdict: Verdict
    look: int  # after which that was said
    looks: int  # that were declared


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """One evaluation of one step. `plan` names what was asked: results compare only under the same plan."""

    step: int
    plan: str
    attempt: int
    status: Status
    loss: float | None = None
    ci95: Interval | None = None  # of the loss
    samples: int = 0  # whose loss was measured
    asked: int = 0  # whose questions were put; not all have one
    answers: int = 0  # that were generated and scored
    total: int = 0  # held out in all
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    intervals: Mapping[str, Interval] = field(default_factory=dict[str, Interval])  # of the metrics
    seconds: float = 0.0
    against: Comparison | None = None
    reason: str | None = None  # why it is not done
    by: Mapping[str, str] = field(default_factory=dict[str, str])  # host, device, dtype, versions

    @property
    def stem(self) -> str:
        return stem_of(self.step, self.plan, self.attempt)

    @property
    def fewest(self) -> int:
        """Of how many samples every figure is, at least."""
        return min(filter(None, (self.samples, self.asked)), default=0)

    def event(self) -> dict[str, object]:
        """The fields of an `eval` event."""
        names = ["step", "status", "loss", "ci95", "samples", "answers", "total", "metrics", "seconds"]
        said: dict[str, object] = asdict(self)
        maybe = [name for name in ("reason", "against") if said[name] is not None]
        return {name: said[name] for name in [*names, *maybe]}


@dataclass(frozen=True, slots=True)
class Prediction:
    """One question as the model read it, what it should have said, what it said, and each metric of that."""

    prompt: str
    reference: str
    answer: str
    scores: dict[str, float]


@dataclass(frozen=True, slots=True)
class Findings:
    """All that one evaluation publishes."""

    result: EvaluationResult
    items: Items | None = None
    predictions: Sequence[Prediction] = ()
    extended: Items | None = None  # of the step compared with, where more of it had to be measured


class Examiner(Protocol):
    """Whoever can answer a run's requests: a GLM with its exam, or anybody's own module."""

    @property
    def plan(self) -> str: ...

    def examine(self, request: Request, run: str, against: Items | None) -> Findings:
        """`against`: what was measured of the step to compare with."""
        ...

    def smaller(self) -> bool:
        """After it ran out of memory: whether it can try again with less."""
        ...


Said = TypeVar("Said", Request, EvaluationResult)


def plan_hash(said: Mapping[str, object]) -> str:
    """A short name for what an evaluation asks: the same words, the same name."""
    text = json.dumps(said, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def whole_plan(plan: str) -> str:
    """The name of the same questions asked of all samples: it compares with nothing that was sampled."""
    return plan_hash({"all samples of": plan})


def sound(result: EvaluationResult) -> EvaluationResult:
    """What can be written and compared: a loss that is no finite number makes an evaluation fail, such a
    metric is left out, and either way the reason says so.
    """
    loss, reason = result.loss, result.reason
    metrics = {name: value for name, value in result.metrics.items() if _finite(value)}
    if odd := sorted(result.metrics.keys() - metrics.keys()):
        reason = reason or f"left out, as no finite numbers: {', '.join(odd)}"
    intervals = {
        name: interval
        for name, interval in result.intervals.items()
        if name in metrics and all(map(_finite, interval))
    }
    against, ci95 = result.against, result.ci95
    kept = replace(
        result,
        metrics=metrics,
        intervals=intervals,
        reason=reason,
        ci95=ci95 if ci95 is not None and all(map(_finite, ci95)) else None,
        against=against if against is not None and _finite(against.difference, *against.interval) else None,
    )
    if loss is None or _finite(loss):
        return kept
    said = f"the held-out loss is {loss}"
    return replace(kept, status="failed", loss=None, ci95=None, against=None, reason=said)


def _finite(*values: object) -> bool:
    """Whether each is a number that JSON has. A user's own metric may give anything."""
    return all(
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        for value in values
    )


def parse_request(text: str, where: Path) -> Request:
    """A request's file. Its weights have to lie in the run."""
    request = _parse(text, _request_form(), where)
    for path in (request.weights, request.against_weights):
        if path is not None and (PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts):
            raise UserError(f"asks for weights outside the run: {path!r}", where=where, cure="move it away")
    return request


def parse_result(text: str, where: Path) -> EvaluationResult:
    """A result's file, of any version so far."""
    return _parse(text, _result_form(), where)


def _parse(text: str, form: TypeAdapter[Said], where: Path) -> Said:
    """Strict JSON, each field of its own type, under its own name. What a newer version added is not read."""
    try:
        parse(text)
        said = form.validate_json(text, strict=True)
    except ValueError as error:
        what = "; ".join(line.strip() for line in str(error).splitlines()[:3])
        raise UserError(f"not of an evaluation: {what}", where=where, cure="move it away") from error
    if not where.name.startswith(f"{said.stem}."):
        raise UserError(f"says that it is {said.stem}", where=where, cure="move it away")
    return said


@cache  # it takes milliseconds to make
def _request_form() -> TypeAdapter[Request]:
    return TypeAdapter(Request)


@cache
def _result_form() -> TypeAdapter[EvaluationResult]:
    return TypeAdapter(EvaluationResult)
