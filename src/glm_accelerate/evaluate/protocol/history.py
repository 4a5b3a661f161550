"""What a run's evaluations found: as the trainer keeps it in its checkpoints, and as the files say."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from glm_accelerate.checkpoint.find import BEST
from glm_accelerate.evaluate.protocol.messages import EvaluationResult
from glm_accelerate.evaluate.statistics.decide import ScoredStep

ON_DISK = {  # names of fields in files
    "requested": "asked",
    "scored": "judged",
    "exam_id": "plan",
    "decided": "told",
    "lowered": "lowered",
}


@dataclass(slots=True)
class EvaluationHistory:
    """The steps that were to be evaluated, and their results: all decisions follow from this alone."""

    requested: list[int] = field(default_factory=list[int])  # steps
    scored: dict[int, ScoredStep] = field(default_factory=dict[int, ScoredStep])  # those with a result
    exam_id: str = ""  # results of another exam don't compare
    decided: int = -1  # the last step whose consequences were decided
    lowered: int = 0  # how often the learning rate was lowered under an earlier exam

    @property
    def pending(self) -> list[int]:
        """Steps whose result is still to come."""
        return [step for step in self.requested if step not in self.scored]

    @property
    def prefix(self) -> list[ScoredStep]:
        """The results in order of their steps, up to the first that is still to come."""
        first = min(self.pending, default=math.inf)
        return [self.scored[step] for step in sorted(self.requested) if step < first]

    @property
    def losses(self) -> dict[int, float]:
        """Held-out losses on one scale, whatever number of samples each was measured on."""
        return {step: one.loss for step, one in self.scored.items() if one.loss is not None}

    def to_json(self) -> dict[str, Any]:
        """The fields as state.json has them."""
        return {ON_DISK[name]: value for name, value in asdict(self).items()}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "EvaluationHistory":
        """From state.json, where steps are strings. The first checkpoints have fewer fields."""
        fields: dict[str, Any] = {name: content[key] for name, key in ON_DISK.items() if key in content}
        fields["scored"] = {int(step): ScoredStep(**one) for step, one in content["judged"].items()}
        return EvaluationHistory(**fields)


def score_step(result: EvaluationResult, earlier: Mapping[int, ScoredStep]) -> ScoredStep:
    """Losses of different samples don't compare: the loss becomes that of the step which it was compared
    with, plus the difference on the same samples.
    """
    loss, against = result.loss, result.against
    if result.status != "done" or loss is None or not math.isfinite(loss):
        return ScoredStep(result.step, None, result.status)
    baseline = earlier.get(against.step) if against else None
    if against is None or baseline is None or baseline.loss is None:
        return ScoredStep(result.step, loss, result.status)
    loss = baseline.loss + against.difference
    return ScoredStep(result.step, loss, result.status, against.step, against.verdict)


def scored_steps(results: Sequence[EvaluationResult]) -> list[ScoredStep]:
    """Results as decisions see them."""
    scored: dict[int, ScoredStep] = {}
    for result in results:
        scored[result.step] = score_step(result, scored)
    return list(scored.values())


def main_results(results: Sequence[EvaluationResult]) -> list[EvaluationResult]:
    """The results of the main exam, one for each step."""
    main = main_exam(results)
    return latest_by_step([result for result in results if result.exam_id == main])


def main_exam(results: Sequence[EvaluationResult]) -> str:
    """The exam of most steps in the latest attempt. Finalists, whose exam has more samples, are few."""
    by_exam: dict[str, list[EvaluationResult]] = {}
    for result in results:
        by_exam.setdefault(result.exam_id, []).append(result)

    def weight(exam_id: str) -> tuple[int, int, int]:
        about = by_exam[exam_id]
        return max(one.attempt for one in about), len(about), -sum(one.samples for one in about)

    return max(by_exam, key=weight, default="")


def latest_by_step(results: Sequence[EvaluationResult]) -> list[EvaluationResult]:
    """One result a step: that of the latest attempt, but one that is done before any that is not."""
    chosen: dict[int, EvaluationResult] = {}
    for result in sorted(results, key=lambda one: (one.status == "done", one.attempt)):
        chosen[result.step] = result
    return [chosen[step] for step in sorted(chosen)]


def best_step(run: Path) -> int | None:
    """The step that the trainer named as the best, whether or not its weights are still there."""
    file = run / BEST
    name = re.search(r"-(\d+)$", file.read_text(encoding="utf-8").strip()) if file.is_file() else None
    return None if name is None else int(name[1])
