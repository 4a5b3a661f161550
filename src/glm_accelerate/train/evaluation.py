"""Evaluation as the training loop sees it: ask, go on, hear, and decide a fixed number of steps later.

step e: ask (a snapshot for an evaluator beside, or at once) ... hear: a result ... step e + lag: decide
What has decided by then is all that can: when a result arrives never changes the weights.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm_accelerate.checkpoint.checkpointer import Outcome
from glm_accelerate.checkpoint.find import BEST
from glm_accelerate.checkpoint.publish import write_text
from glm_accelerate.config.schema import EvaluateSection
from glm_accelerate.evaluate import ledger
from glm_accelerate.evaluate.decide import best, finalists, judge, lowered, overshoot, stopped_at
from glm_accelerate.evaluate.exam import Items
from glm_accelerate.evaluate.examine import GlmExaminer, failed
from glm_accelerate.evaluate.results import Request, Result, whole_plan
from glm_accelerate.observe.events import Events
from glm_accelerate.parallel.ranks import Ranks
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.train.asked import Asked
from glm_accelerate.train.snapshots import Snapshots
from glm_accelerate.train.state import Judging, Progress

LOOK, PAUSE = 0.5, 0.05  # seconds between two looks at the results, while training and while it waits
MOMENT = 30.0  # seconds that the end of a run waits for a snapshot that is being written
LANDING = 600.0  # ... and that training does where a decision depends on it


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
    settle: Callable[[], None]  # after an evaluation inline
    where: str
    lowered: int = 0  # how often the learning rate was
    stopped: str | None = None  # why there is nothing more to train
    _decided: int = -1  # the last evaluation that counts
    _looked: float = 0.0

    @property
    def judging(self) -> Judging:
        return self.progress.judging

    def begin(self, *, fresh: bool) -> None:
        """Before the first step. What earlier attempts asked and found beyond it is given up."""
        branch = -1 if fresh else self.progress.position
        self.ranks.decide(lambda: ledger.abandon_after(self.run, branch, self.attempt))
        self.asked.remember()
        if self.snapshots is not None:
            self.snapshots.stage()
        if fresh:
            self._ask(0)
        else:
            self._ask_again()
            self._decide(lambda: False)

    def after(self, step: int, interrupted: Callable[[], bool]) -> str | None:
        """All that happens between two steps. Returns why to stop, if that was decided."""
        if step % self.every == 0 or step == self.last:
            self._ask(step)
        self._hear()
        return self._decide(interrupted)

    def finish(self) -> None:
        """The end of training: hear what is still to come, look closely at the finalists, name the best."""
        if self.snapshots is not None:
            self.snapshots.wait(MOMENT)
        if self.ranks.first:
            self._hear()
            followed = self.asked.beside is not None or any(
                one.status == "done" for one in self.judging.judged.values()
            )
            ends = time.monotonic() + (self.section.patience if followed else 0.0)
            if self._await(lambda: self.judging.pending, ends):
                self._name(self._crown(ends))
            else:
                said = f"not evaluated at the end: steps {self.judging.pending}"
                self._warn([f"{said}; `evaluate {self.run} --follow` does it now"])
        self.close()

    def close(self) -> None:
        """Let everything go. What is asked stays asked."""
        self.asked.close()
        if self.snapshots is not None:
            self._land(self.snapshots.close(MOMENT))

    def _ask(self, step: int) -> None:
        """Have the weights as they are evaluated."""
        if step not in self.judging.asked:
            self.judging.asked.append(step)
        self.asked.attempts[step] = self.attempt
        if self.inline is not None:
            self._examine(self.inline, step)
            return
        assert self.snapshots is not None
        (busy,) = self.ranks.total([self.snapshots.busy()])
        if busy and self.section.keep == "latest" and not self.section.decides:
            if self.ranks.first:
                reason = "the snapshot before is still being written"
                self._take(self.asked.answer(self.asked.request(step), "skipped", reason))
            return
        self.snapshots.wait(LANDING)
        self.snapshots.publish(step)

    def _examine(self, examiner: GlmExaminer, step: int) -> None:
        """Now, by all ranks together."""

        def against() -> dict[str, Any]:
            stem = self.asked.request(step).against
            items = None if stem is None else ledger.read_items(self.run, stem)
            said = (
                {}
                if items is None
                else {"losses": items.losses_N.tolist(), "targets": items.targets_N.tolist()}
            )
            return {"stem": stem if said else None, **said}

        said = self.ranks.decide(against)
        request = Request(step, self.asked.plan, self.attempt, "", against=said["stem"])
        items = None if said["stem"] is None else Items.of(said["losses"], said["targets"])
        try:
            findings = examiner.examine(request, str(self.run), items)
        except (UserError, MemoryError, RuntimeError) as error:
            findings = failed(request, error)
        self.settle()
        if self.ranks.first:
            ledger.publish(self.run, findings)
            result = self.asked.read(request)
            self._take([] if result is None else [result])

    def _ask_again(self) -> None:
        """What an earlier attempt asked and has not heard, on this branch."""
        for step in self.judging.pending:
            found = self.ranks.decide(lambda step=step: self._found(step))
            if found == "nothing" and step == self.progress.position:
                self._ask(step)
            elif self.ranks.first:
                request = self.asked.request(step)
                lost = found == "nothing"
                self._take(
                    self.asked.answer(request, "failed", "its snapshot is gone")
                    if lost
                    else self.asked.post(request)
                )

    def _found(self, step: int) -> str:
        """What is there of an evaluation that was asked."""
        if self.asked.read(self.asked.request(step)) is not None:
            return "result"
        there = self.snapshots is not None and self.snapshots.path(step).is_dir()
        return "snapshot" if there else "nothing"

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

    def _land(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes if self.ranks.first else ():
            request = self.asked.request(outcome.step)
            if outcome.path is None:
                self._take(self.asked.answer(request, "failed", f"no snapshot: {outcome.error}"))
                continue
            self.events.emit("snapshot", {"step": outcome.step, "blocked_seconds": outcome.blocked_seconds})
            self._take(self.asked.post(request))

    def _take(self, results: Iterable[Result]) -> None:
        """Results are in."""
        for result in results:
            told = {"where": self.where, "taken_at": self.progress.position}
            self.events.emit("eval", {**result.event(), **told})
            if result.plan != self.asked.plan:  # a finalist's
                continue
            self.judging.judged[result.step] = judge(result, self.judging.judged)
            if result.status == "done" and result.loss is not None:
                self.progress.losses[result.step] = result.loss
            prefix, margin = self.judging.prefix, self.section.margin
            self._name(best(prefix, margin))
            if self.snapshots is not None:
                self.snapshots.keep({*self.judging.pending, *finalists(prefix, margin)})

    def _decide(self, interrupted: Callable[[], bool]) -> str | None:
        """What follows from the evaluations whose time has come, on all ranks; after a resume the same."""
        until = self.progress.position - self.lag
        due = max((step for step in self.judging.asked if step <= until), default=-1)
        if self.section.decides and due > self._decided and self.stopped is None:
            said = self.ranks.decide(lambda: self._conclude(due, interrupted))
            if said is not None:  # else a signal: it is decided when the run goes on
                self._decided, self.lowered, self.stopped = due, said["lowered"], said["stopped"]
        return self.stopped

    def _conclude(self, step: int, interrupted: Callable[[], bool]) -> dict[str, Any] | None:
        """The decision that is due: from the evaluations up to this step and no other."""
        if not self._heard(step, interrupted):
            return None
        section, position, said = self.section, self.progress.position, list[str]()
        prefix = [one for one in self.judging.prefix if one.step <= step]
        times, stopped = 0, None
        if section.lower_rate_after is not None:
            times = lowered(prefix, section.lower_rate_after, section.margin)
        if times > self.lowered:
            said.append(
                f"the learning rate is {section.lower_rate_by**times:g} of the schedule's from here on"
            )
        patience = section.stop_after
        if patience is not None and (at := stopped_at(prefix, patience, section.margin)) is not None:
            stopped = f"no gain in {patience} evaluations up to step {at}"
            over = overshoot(prefix, patience, section.margin, position)
            said.append(f"stop: {stopped}, known {over} steps later")
        for sentence in said:
            self.events.emit("decision", {"step": position, "said": sentence})
        return {"lowered": times, "stopped": stopped}

    def _heard(self, step: int, interrupted: Callable[[], bool]) -> bool:
        """Wait for the evaluations up to this step, but not for ever; False if there is something urgent."""

        def missing() -> list[int]:
            return [one for one in self.judging.pending if one <= step]

        ends = time.monotonic() + self.asked.limit
        while not self._await(missing, time.monotonic() + 1.0):
            if interrupted():
                return False
            for late in missing() if time.monotonic() > ends else ():
                request = self.asked.request(late)
                self._take(self.asked.answer(request, "timeout", "nobody evaluated it in time"))
        return True

    def _await(self, missing: Callable[[], list[int]], ends: float) -> bool:
        """Whether nothing is missing any more, by then."""
        while missing():
            if time.monotonic() > ends:
                return False
            time.sleep(PAUSE)
            self._looked = 0.0
            self._hear()
        return True

    def _crown(self, ends: float) -> int | None:
        """The best of the finalists, on all held-out samples where that can be had."""
        prefix, margin = self.judging.prefix, self.section.margin
        near = finalists(prefix, margin)
        there = [step for step in near if self.snapshots is not None and self.snapshots.path(step).is_dir()]
        if self.whole or len(near) < 2 or there != near:
            return best(prefix, margin)
        plan, attempts = whole_plan(self.asked.plan), self.asked.attempts
        requests = [
            Request(one, plan, attempts[one], f"snapshots/snapshot-{one}", whole=True) for one in near
        ]
        found: dict[int, float] = {}

        def missing() -> list[int]:
            for request in requests:
                result = self.asked.read(request)
                if result is not None and result.loss is not None:
                    found[request.step] = result.loss
            return [step for step in near if step not in found]

        for request in requests:
            self.asked.post(request)
        if not self._await(missing, ends):
            return best(prefix, margin)
        winner = min(found, key=lambda step: (found[step], step))
        losses = ", ".join(f"step {step} {loss:.4f}" for step, loss in sorted(found.items()))
        said = f"the best is step {winner}: on all held-out samples {losses}"
        self.events.emit("decision", {"step": self.progress.position, "said": said})
        return winner

    def _name(self, step: int | None) -> None:
        """Leave word which weights are the best."""
        for path in () if step is None else (f"snapshots/snapshot-{step}", f"checkpoints/checkpoint-{step}"):
            if (self.run / path).is_dir():
                write_text(self.run / BEST, f"{path}\n")
                return

    def _warn(self, said: Iterable[str]) -> None:
        for sentence in said:
            self.events.emit("warning", {"said": sentence})
