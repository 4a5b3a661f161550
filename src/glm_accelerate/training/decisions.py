"""What evaluations decide about training: when the learning rate is lowered, and when training stops.

A result of step e decides at step e + lag, neither earlier nor later: so the weights do not depend on how
fast an evaluator is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from glm_accelerate.config.schema import EvaluateSection
from glm_accelerate.evaluate.protocol.history import EvaluationHistory
from glm_accelerate.evaluate.statistics.decide import ScoredStep, stopped_at, times_lowered


@dataclass(slots=True)
class Decisions:
    """The decisions of a run, the same on every rank: all of them apply the first rank's conclusions."""

    section: EvaluateSection
    history: EvaluationHistory
    lag: int
    lowered: int = 0  # how often the learning rate was
    stopped: str | None = None  # why training ends, once it does

    def resume(self, exam_id: str, position: int) -> bool:
        """Decide as before this start. Results of another exam don't compare: then the history begins anew
        at `position`, a lowered rate stays lowered, and the answer is True.
        """
        history = self.history
        known = [one for one in history.prefix if one.step <= history.decided]
        self.lowered, (self.stopped, _) = self._times_lowered(known), self._stopped(known)
        restarted = history.exam_id not in ("", exam_id)  # the first checkpoints don't name it
        if restarted:
            history.requested[:], history.decided, history.lowered = [position], -1, self.lowered
            history.scored.clear()
            self.stopped = None
        history.exam_id = exam_id
        return restarted

    def due(self, position: int) -> int | None:
        """The step up to which results decide now, if there is one."""
        step = max((step for step in self.history.requested if step <= position - self.lag), default=-1)
        if self.section.decides and step > self.history.decided and self.stopped is None:
            return step
        return None

    def conclude(self, step: int, position: int) -> tuple[dict[str, Any], list[str]]:
        """What results up to `step` decide, and that in sentences; nothing is applied yet."""
        section, sentences = self.section, list[str]()
        prefix = [one for one in self.history.prefix if one.step <= step]
        times, (stopped, at) = self._times_lowered(prefix), self._stopped(prefix)
        if times > self.lowered:
            share, patience = section.lower_rate_by**times, section.lower_rate_after
            sentences.append(
                f"the learning rate is {share:g} of the schedule's from step {position + 1} on: "
                f"no gain in {patience} evaluations up to step {step}"
            )
        if stopped is not None:  # the steps after it were trained because its result came later
            sentences.append(f"stop: {stopped}; overshoot {max(0, position - at)} steps")
        return {"decided": step, "lowered": times, "stopped": stopped}, sentences

    def apply(self, conclusions: dict[str, Any]) -> None:
        """Take over the first rank's conclusions."""
        self.history.decided = conclusions["decided"]
        self.lowered, self.stopped = conclusions["lowered"], conclusions["stopped"]

    def _times_lowered(self, prefix: Sequence[ScoredStep]) -> int:
        patience, margin = self.section.lower_rate_after, self.section.margin
        return 0 if patience is None else self.history.lowered + times_lowered(prefix, patience, margin)

    def _stopped(self, prefix: Sequence[ScoredStep]) -> tuple[str | None, int]:
        """Why training ends, and the step at which that was known."""
        patience, margin = self.section.stop_after, self.section.margin
        at = None if patience is None else stopped_at(prefix, patience, margin)
        return (None, 0) if at is None else (f"no gain in {patience} evaluations up to step {at}", at)
