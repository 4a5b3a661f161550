"""Evaluation as the training loop sees it: ask, go on, hear, and decide a fixed number of steps later.

step e: ask (a snapshot for an evaluator beside, or at once) ... hear: a result ... step e + lag: decide
What has decided by then is all that can: when a result arrives never changes the weights.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm_accelerate.checkpoint.checkpointer import SaveOutcome
from glm_accelerate.checkpoint.find import BEST, best_of
from glm_accelerate.config.schema import EvaluateSection
from glm_accelerate.evaluate.measuring.examine import GlmExaminer, failed
from glm_accelerate.evaluate.protocol.history import judge
from glm_accelerate.evaluate.protocol.messages import EvaluationResult, Request
from glm_accelerate.evaluate.statistics.decide import Judged, best, finalists, lowered, overshoot, stopped_at
from glm_accelerate.evaluate.statistics.intervals import Items
from glm_accelerate.observe.events import Events
from glm_accelerate.parallel.ranks import Ranks
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.files import write_text
from glm_accelerate.train.asked import GIVEN_UP, Asked
from glm_accelerate.train.branch import Branch
from glm_accelerate.train.snapshots import Snapshots
from glm_accelerate.train.state import Judging, Progress

LOOK, PAUSE = 0.5, 0.05  # seconds between two looks at the results, while training and while it waits
QUIET = 5.0  # seconds of waiting before a word, and then four times as many again
MOMENT = 30.0  # seconds that the end of a run waits for a snapshot that is being written
LANDING = 300.0  # ... and that training does where this one may not be left out

Interrupted = Callable[[], bool]  # whether somebody wants the run to stop


@dataclass(slots=True)
class Evaluation:
    """One rank's part in every evaluation of a run. All ranks call the same methods at the same steps."""

    run: Path
    asked: Asked
    section: EvaluateSection
    every: int
    lag: int  # steps from an evaluation's own to the one before which it decides
    last: int  # step
    attempt: int
    ranks: Ranks
    events: Events
    progress: Progress
    whole: bool  # every evaluation has all held-out samples
    inline: GlmExaminer | None  # on the trainer's own weights
    snapshots: Snapshots | None  # otherwise
    branch: Branch  # that of earlier attempts
    settle: Callable[[], None]  # after an evaluation inline
    where: str
    lowered: int = 0  # how often the learning rate was
    stopped: str | None = None  # why there is nothing more to train
    _unnamed: int | None = None  # the best step, as long as its checkpoint is still to come
    _looked: float = 0.0
    _ready: list[int] = field(default_factory=list[int])  # steps whose snapshot is there, not posted yet
    _whole: dict[int, EvaluationResult] = field(
        default_factory=dict[int, EvaluationResult]
    )  # of finalists, on all samples

    @property
    def judging(self) -> Judging:
        return self.progress.judging

    def begin(self, interrupted: Interrupted, *, fresh: bool) -> None:
        """Before the first step."""
        if not self.branch.named:
            self.branch.give_up()
        self.branch.then = self._keep_best
        known = [one for one in self.judging.prefix if one.step <= self.judging.told]
        self.lowered, self.stopped = self._lowered(known), self._stop(known)  # as it was decided
        self._begin_plan()
        self.asked.remember()
        if self.ranks.first:
            self.asked.answer_others()
        if self.snapshots is not None:
            self.snapshots.stage()
        if fresh:
            self._name(None)
            self._ask(0)
        else:
            self._ask_again()
            self._keep_best()
            self._decide(interrupted)

    def after(self, step: int, interrupted: Interrupted) -> str | None:
        """All that happens between two steps. Returns why to stop, if that was decided."""
        if step % self.every == 0 or step == self.last:
            self._ask(step)
        self._hear()
        return self._decide(interrupted)

    def finish(self, interrupted: Interrupted) -> None:
        """The end of training: hear what is still to come, look closely at the finalists, name the best.
        The other ranks wait for the first one, as long as it takes.
        """
        if self.snapshots is not None:
            self.snapshots.wait(MOMENT)
        self.ranks.decide(lambda: self._last_word(interrupted))
        self.close(MOMENT)

    def close(self, limit: float) -> None:
        """Let everything go; a snapshot under way gets so many seconds. What is asked stays asked."""
        self.asked.close()
        if self.snapshots is not None:
            self._land(self.snapshots.close(limit))
            self._post_ready()

    def _begin_plan(self) -> None:
        """Answers to other questions don't compare: where others are asked than before, judging begins anew
        with the weights as they are. A rate that was lowered stays so.
        """
        judging, position = self.judging, self.progress.position
        if judging.plan not in ("", self.asked.plan):  # the first checkpoints don't say
            judging.asked[:], judging.told, judging.lowered = [position], -1, self.lowered
            judging.judged.clear()
            self.stopped = None
            said = "data.dev, evaluate, a file of a metric, or the tokenizer is another"
            self._warn(
                [f"evaluations ask otherwise than before ({said}): step {position} is the first that counts"]
            )
        judging.plan = self.asked.plan

    def _ask(self, step: int) -> None:
        """Have the weights as they are evaluated."""
        if step > self.branch.step:
            self.branch.give_up()
        if step not in self.judging.asked:
            self.judging.asked.append(step)
        self.asked.attempts[step] = self.attempt
        if self.inline is not None:
            self._examine(self.inline, step)
            return
        assert self.snapshots is not None
        if self.section.keep == "all" or self.section.decides or step == self.last:
            self.snapshots.wait(LANDING)
        busy, given_up = self.ranks.total([self.snapshots.busy(), self.asked.given_up])
        if not busy and not given_up:
            self.snapshots.publish(step)
        elif self.ranks.first:
            request = self.asked.request(step)
            reason = GIVEN_UP if given_up else "the snapshot before is still being written"
            self._take(self.asked.answer(request, "failed" if given_up else "skipped", reason))

    def _examine(self, examiner: GlmExaminer, step: int) -> None:
        """Now, by all ranks together."""

        def against() -> dict[str, Any]:
            stem = self.asked.request(step).against
            items = None if stem is None else self.asked.items(stem)
            if items is None:
                return {"stem": None}
            return {"stem": stem, "losses": items.losses_N.tolist(), "targets": items.targets_N.tolist()}

        said = self.ranks.decide(against)
        request = Request(step, self.asked.plan, self.attempt, "", against=said["stem"])
        items = None if said["stem"] is None else Items.of(said["losses"], said["targets"])
        try:
            findings = examiner.examine(request, str(self.run), items)
        except (UserError, MemoryError, RuntimeError, OSError) as error:
            findings = failed(request, error)
        self.settle()
        if self.ranks.first:
            self._take(self.asked.publish(findings))

    def _ask_again(self) -> None:
        """What an earlier attempt asked and has not heard, on this branch, in order of steps."""
        for step in self.judging.pending:
            found = self.ranks.decide(lambda step=step: self._found(step))
            if found == "nothing" and step == self.progress.position:
                self._ask(step)
            elif found == "nothing" and self.ranks.first:
                self._take(self.asked.answer(self.asked.request(step), "failed", "its snapshot is gone"))
        self._post_ready()

    def _found(self, step: int) -> str:
        """What is there of an evaluation that was asked. Its result is taken at once."""
        result = self.asked.read(self.asked.request(step))
        if result is not None:
            self._take([result])
            return "result"
        if self.snapshots is None or not self.snapshots.path(step).is_dir():
            return "nothing"
        self._ready.append(step)
        return "snapshot"

    def _hear(self) -> None:
        """Snapshots that can be evaluated now, and results that are in."""
        if self.snapshots is not None:
            self._land(self.snapshots.landed())
        now = time.monotonic()
        if self.ranks.first and now - self._looked >= LOOK:
            self._looked = now
            results, said = self.asked.look()
            self._warn(said)
            self._take(results)
            if self._unnamed is not None:
                self._name(self._unnamed)
        self._post_ready()

    def _land(self, outcomes: Iterable[SaveOutcome]) -> None:
        for outcome in outcomes if self.ranks.first else ():
            if outcome.path is None:
                request = self.asked.request(outcome.step)
                self._take(self.asked.answer(request, "failed", f"no snapshot: {outcome.error}"))
                continue
            self.events.emit("snapshot", {"step": outcome.step, "blocked_seconds": outcome.blocked_seconds})
            self._ready.append(outcome.step)

    def _post_ready(self) -> None:
        """Leave the requests. Where results decide, what a step is compared with follows from those that
        count         by then and no other, so it is asked when they are in.
        """
        for step in sorted(self._ready) if self.ranks.first else ():
            lag = self.asked.lag
            if not lag or all(one > step - lag for one in self.judging.pending):
                self._ready.remove(step)
                self._take(self.asked.post(self.asked.request(step)))

    def _take(self, results: Iterable[EvaluationResult]) -> None:
        """Results are in."""
        for result in results:
            told = {"where": self.where, "taken_at": self.progress.position}
            self.events.emit("eval", {**result.event(), **told})
            if result.plan != self.asked.plan:  # a finalist's
                self._whole[result.step] = result
                continue
            if result.status == "done" and result.reason is not None:
                self._warn([f"evaluation of step {result.step}: {result.reason}"])
            self.judging.judged[result.step] = judge(result, self.judging.judged)
            if result.status == "done" and result.loss is not None:
                self.progress.losses[result.step] = result.loss
            self._keep_best()

    def _keep_best(self) -> None:
        """Name the best, and let snapshots go that nobody will want. As long as another branch may be gone on
        with, all stays as that has it.
        """
        if not self.ranks.first or not self.branch.given_up:
            return
        prefix, margin = self.judging.prefix, self.section.margin
        self._name(best(prefix, margin))
        if self.snapshots is not None:
            later = self.judging.judged.keys() - {one.step for one in prefix}  # they may still win
            compared = self.asked.compared(self.progress.position)
            self.snapshots.keep({*self.judging.pending, *finalists(prefix, margin), *later, *compared})

    def _decide(self, interrupted: Interrupted) -> str | None:
        """What follows from the evaluations whose time has come, on all ranks."""
        until = self.progress.position - self.lag
        due = max((step for step in self.judging.asked if step <= until), default=-1)
        if self.section.decides and due > self.judging.told and self.stopped is None:
            said = self.ranks.decide(lambda: self._conclude(due, interrupted))
            if said is not None:  # else a signal: it is decided when the run goes on
                self.judging.told, self.lowered, self.stopped = due, said["lowered"], said["stopped"]
        return self.stopped

    def _conclude(self, step: int, interrupted: Interrupted) -> dict[str, Any] | None:
        """The decision that is due: from the evaluations up to this step and no other."""
        if not self._heard(step, interrupted):
            return None
        section, position, said = self.section, self.progress.position, list[str]()
        prefix = [one for one in self.judging.prefix if one.step <= step]
        times, stopped = self._lowered(prefix), self._stop(prefix)
        if times > self.lowered:
            share, patience = section.lower_rate_by**times, section.lower_rate_after
            said.append(
                f"the learning rate is {share:g} of the schedule's from step {position + 1} on: "
                f"no gain in {patience} evaluations up to step {step}"
            )
        if stopped is not None and section.stop_after is not None:
            over = overshoot(prefix, section.stop_after, section.margin, position)
            said.append(f"stop: {stopped}; overshoot {over} steps")
        for sentence in said:
            self.events.emit("decision", {"step": position, "said": sentence})
        return {"lowered": times, "stopped": stopped}

    def _lowered(self, prefix: Sequence[Judged]) -> int:
        """How often the learning rate is lowered by then."""
        patience, margin = self.section.lower_rate_after, self.section.margin
        return 0 if patience is None else self.judging.lowered + lowered(prefix, patience, margin)

    def _stop(self, prefix: Sequence[Judged]) -> str | None:
        """Why training ends by then, if it does."""
        patience, margin = self.section.stop_after, self.section.margin
        at = None if patience is None else stopped_at(prefix, patience, margin)
        return None if at is None else f"no gain in {patience} evaluations up to step {at}"

    def _heard(self, step: int, interrupted: Interrupted) -> bool:
        """Wait for the evaluations up to this step, but not for ever; False if there is something urgent."""

        def missing() -> list[int]:
            return [one for one in self.judging.pending if one <= step]

        ends = time.monotonic() + self.asked.limit
        while not self._await(missing, ends, interrupted):
            if interrupted():
                return False
            request = self.asked.request(missing()[0])
            self._take(self.asked.answer(request, "timeout", "nobody evaluated it in time"))
        return True

    def _await(self, missing: Callable[[], list[int]], ends: float, interrupted: Interrupted) -> bool:
        """Whether nothing is missing any more, by then. A person is told what is waited for."""
        tell, told = time.monotonic() + QUIET, 0
        while steps := missing():
            now = time.monotonic()
            if now > ends or interrupted():
                return False
            if now > tell:
                tell, told = now + QUIET * 4 ** (told + 1), told + 1
                said = f"waiting for evaluations of steps {steps}, {ends - now:.0f} s more at the most"
                alone = (
                    "" if self.asked.beside is not None else f": `evaluate {self.run} --follow` makes them"
                )
                self._warn([said + alone])
            time.sleep(PAUSE)
            self._looked = 0.0
            self._hear()
        return True

    def _last_word(self, interrupted: Interrupted) -> None:
        """The first rank's: what is still to come, and the best."""
        self._hear()
        followed = self.asked.beside is not None or any(
            one.status == "done" for one in self.judging.judged.values()
        )
        ends = time.monotonic() + (self.section.patience if followed else 0.0)
        if self._await(lambda: self.judging.pending, ends, interrupted):
            self._name(self._crown(ends, interrupted))
        else:
            said = f"not evaluated at the end: steps {self.judging.pending}"
            self._warn([f"{said}; `evaluate {self.run} --follow` does it now"])

    def _crown(self, ends: float, interrupted: Interrupted) -> int | None:
        """The best of the finalists, on all held-out samples where that can be had."""
        prefix, margin = self.judging.prefix, self.section.margin
        near, winner = finalists(prefix, margin), best(prefix, margin)
        there = [step for step in near if self.snapshots is not None and self.snapshots.path(step).is_dir()]
        if self.whole or len(near) < 2 or there != near or self.asked.given_up:
            return winner
        for step in near:
            self._take(self.asked.post(self.asked.finalist(step)))

        def missing() -> list[int]:
            return [step for step in near if step not in self._whole]

        self._await(missing, ends, interrupted)
        found = {step: one.loss for step, one in self._whole.items() if one.loss is not None}
        if found.keys() != set(near):
            return winner
        winner = min(found, key=lambda step: (found[step], step))
        losses = ", ".join(f"step {step} {loss:.4f}" for step, loss in sorted(found.items()))
        said = f"the best is step {winner}: on all held-out samples {losses}"
        self.events.emit("decision", {"step": self.progress.position, "said": said})
        return winner

    def _name(self, step: int | None) -> None:
        """Leave word which weights are the best. As long as only the beginning is known, none are. Inline
        there is a checkpoint some time after this: until then the best before it stays named.
        """
        if not self.ranks.first:
            return
        judged = any(one.loss is not None for one in self.judging.judged.values() if one.step)
        paths = (f"snapshots/snapshot-{step}", f"checkpoints/checkpoint-{step}") if judged else ()
        there = next((path for path in paths if (self.run / path).is_dir()), None)
        self._unnamed = step if paths and there is None else None
        try:
            if there is None and (step is None or best_of(self.run) is None):
                (self.run / BEST).unlink(missing_ok=True)
            elif there is not None:
                write_text(self.run / BEST, f"{there}\n")
        except OSError as error:
            self._warn([f"which weights are the best cannot be written: {error.strerror}"])

    def _warn(self, said: Iterable[str]) -> None:
        for sentence in said:
            self.events.emit("warning", {"said": sentence})
