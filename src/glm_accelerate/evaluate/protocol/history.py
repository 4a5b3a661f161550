"""What a run's evaluations come to, step by step: of several plans and attempts the ones that count."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from glm_accelerate.checkpoint.find import BEST
from glm_accelerate.evaluate.protocol.messages import EvaluationResult
from glm_accelerate.evaluate.statistics.decide import Judged


def course_of(results: Sequence[EvaluationResult]) -> list[EvaluationResult]:
    """By step: what was found of it, by the questions that most steps were asked."""
    main = main_plan(results)
    return one_a_step([result for result in results if result.plan == main])


def judged(course: Sequence[EvaluationResult]) -> list[Judged]:
    """As decisions see them: with losses on one scale, whatever number of samples each was measured on."""
    found: dict[int, Judged] = {}
    for result in course:
        found[result.step] = judge(result, found)
    return list(found.values())


def main_plan(results: Sequence[EvaluationResult]) -> str:
    """What most steps were asked in the latest attempt; finalists, who are asked more, are few."""
    asked: dict[str, list[EvaluationResult]] = {}
    for result in results:
        asked.setdefault(result.plan, []).append(result)

    def weight(plan: str) -> tuple[int, int, int]:
        about = asked[plan]
        return max(one.attempt for one in about), len(about), -sum(one.samples for one in about)

    return max(asked, key=weight, default="")


def one_a_step(results: Sequence[EvaluationResult]) -> list[EvaluationResult]:
    """By step: of several attempts at one what the last of them found, if it found anything."""
    chosen: dict[int, EvaluationResult] = {}
    for result in sorted(results, key=lambda one: (one.status == "done", one.attempt)):
        chosen[result.step] = result
    return [chosen[step] for step in sorted(chosen)]


def named_best(run: Path) -> int | None:
    """The step that the trainer named, whether or not its weights are still there."""
    file = run / BEST
    said = re.search(r"-(\d+)$", file.read_text(encoding="utf-8").strip()) if file.is_file() else None
    return None if said is None else int(said[1])


def judge(result: EvaluationResult, earlier: Mapping[int, Judged]) -> Judged:
    """Losses of different samples don't compare: the loss of a sample becomes that of the step which it was
    compared with, plus the difference on the same samples.
    """
    loss, against = result.loss, result.against
    if result.status != "done" or loss is None or not math.isfinite(loss):
        return Judged(result.step, None, result.status)
    base = earlier.get(against.step) if against else None
    if against is None or base is None or base.loss is None:
        return Judged(result.step, loss, result.status)
    loss = base.loss + against.difference
    return Judged(result.step, loss, result.status, against.step, against.verdict)
