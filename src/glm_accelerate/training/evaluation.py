"""Evaluation as the training loop sees it: request, go on, receive results, decide a fixed time later.

step e: a snapshot and a request (or at once, inline) ... later: its result ... step e + lag: the decision
"""

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from glm_accelerate.checkpoint.checkpointer import Checkpointer, Save, SaveOutcome
from glm_accelerate.checkpoint.format import WEIGHTS, path_of
from glm_accelerate.evaluate.measuring.exam import exam_of
from glm_accelerate.evaluate.measuring.examine import GlmExaminer, failed
from glm_accelerate.evaluate.protocol.child import start_beside
from glm_accelerate.evaluate.protocol.history import EvaluationHistory, score_step
from glm_accelerate.evaluate.protocol.messages import EvaluationResult, Request
from glm_accelerate.evaluate.protocol.requests import GIVEN_UP, Requests
from glm_accelerate.evaluate.statistics.decide import Status, best, finalists
from glm_accelerate.evaluate.statistics.intervals import SampleLosses
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.optim.mover import Mover
from glm_accelerate.parallel.shard import free
from glm_accelerate.plan.run_plan import RunPlan
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.training.budget import Budget, is_due
from glm_accelerate.training.decisions import Decisions
from glm_accelerate.training.life import Branch, Life
from glm_accelerate.training.settle import Settled
from glm_accelerate.training.snapshots import BestWeights, keep_snapshots, wait_for
from glm_accelerate.training.state import Progress, resume_tensors

POLL, PAUSE = 0.5, 0.05  # seconds between two polls for results, while training and while it waits
QUIET = 5.0  # seconds of waiting before the first warning; then four times as long each time
SNAPSHOT_AT_END = 30.0  # seconds that the end of a run waits for a snapshot that is being written
SNAPSHOT_NEEDED = 300.0  # ... and that training does before one that may not be left out

Interrupted = Callable[[], bool]  # whether somebody wants the run to stop


@dataclass(slots=True)
class Evaluation:
    """One rank's part in all evaluations: `begin`, `after` each step, then `finish` or `close`, at the same
    steps on all ranks. There is either `inline` or `snapshots`.
    """

    life: Life
    plan: RunPlan
    progress: Progress
    branch: Branch  # of earlier attempts
    requests: Requests
    decisions: Decisions
    best: BestWeights
    on_all_samples: bool  # every evaluation, not only that of finalists
    inline: GlmExaminer | None  # measures the trainer's own weights
    snapshots: Checkpointer | None  # for an evaluator elsewhere
    snapshot: Callable[[int], Save]  # of a step: the weights as they are
    budget: Budget | None  # of the share that evaluation takes
    _next_poll: float = 0.0
    _to_post: list[int] = field(default_factory=list[int])  # steps whose snapshot is published
    _finalists: dict[int, EvaluationResult] = field(default_factory=dict[int, EvaluationResult])

    @property
    def history(self) -> EvaluationHistory:
        return self.progress.judging

    def begin(self, interrupted: Interrupted, *, fresh: bool) -> None:
        """Before the first step: the branch first, as what earlier attempts left beyond it would be read as
        ours; then what was decided, as requests are compared with the history that this leaves.
        """
        if not self.branch.named:
            self.branch.give_up()
        self.branch.after = self._keep_best
        position = self.progress.position
        if self.decisions.resume(self.requests.exam_id, position):
            other = "data.dev, evaluate, a file of a metric, or the tokenizer is another"
            counts = f"step {position} is the first that counts"
            self._warn(f"evaluations ask otherwise than before ({other}): {counts}")
        self.requests.resume(first=self.life.ranks.first)
        if self.snapshots is not None:
            self.snapshots.stage(self.snapshot(position).groups)
        if fresh:
            self._name_best(None)
            self._evaluate(0)
        else:
            self._request_again()
            self._keep_best()
            self._decide(interrupted)

    def after(self, step: int, interrupted: Interrupted) -> str | None:
        """Between two steps. Returns why to stop, if that was decided."""
        due = is_due(step, self.plan, self.progress)
        if due:
            self._evaluate(step)
        self._poll()
        if self.budget is not None:
            self.budget.after(step, evaluated=due)
        return self._decide(interrupted)

    def finish(self, interrupted: Interrupted) -> None:
        """The end of training: wait for results, measure the finalists on all samples, name the best. The
        other ranks wait for the first one, as long as it takes.
        """
        if self.snapshots is not None:
            wait_for(self.snapshots, SNAPSHOT_AT_END)
        self.life.ranks.decide(lambda: self._wait_for_the_rest(interrupted))
        self.close(SNAPSHOT_AT_END)

    def close(self, limit: float) -> None:
        """End the evaluator; what it has claimed is free again. A snapshot that is being written gets `limit`
        seconds; requests stay posted.
        """
        if self.requests.evaluator is not None:
            self.requests.evaluator.close()
        if self.snapshots is not None:
            self._published(self.snapshots.close(limit))
            self._post()

    def _evaluate(self, step: int) -> None:
        """Have the weights as they are now evaluated."""
        if step > self.branch.step:
            self.branch.give_up()
        if step not in self.history.requested:
            self.history.requested.append(step)
        self.requests.attempts[step] = self.life.attempt
        self.requests.at_most = None if self.progress.pace is None else self.progress.pace.samples
        with nullcontext() if self.budget is None else self.budget.waiting():
            if self.snapshots is None:
                self._examine(step)
            else:
                self._publish(step, self.snapshots)

    def _publish(self, step: int, snapshots: Checkpointer) -> None:
        """A snapshot, for an evaluator elsewhere."""
        section = self.requests.section
        if section.keep == "all" or section.decides or step == self.plan.steps:
            wait_for(snapshots, SNAPSHOT_NEEDED)
        busy, given_up = self.life.ranks.total([snapshots.busy(), self.requests.given_up])
        if given_up:
            self._give_up(step, GIVEN_UP)
        elif busy:
            self._give_up(step, "the snapshot before is still being written", "skipped")
        else:
            snapshots.save(self.snapshot(step))

    def _examine(self, step: int) -> None:
        """Evaluate inline, by all ranks together."""
        assert self.inline is not None
        stem, losses, targets = self.life.ranks.decide(lambda: self.requests.baseline(step))
        most = self.requests.at_most
        request = Request(step, self.requests.exam_id, self.life.attempt, "", against=stem, at_most=most)
        baseline = None if stem is None else SampleLosses.of(losses, targets)
        try:
            findings = self.inline.examine(request, str(self.life.run), baseline)
        except (UserError, MemoryError, RuntimeError, OSError) as error:
            findings = failed(request, error)
        free(self.inline.model)
        if self.life.ranks.first:
            self._receive(self.requests.publish(findings))

    def _request_again(self) -> None:
        """Requests of an earlier attempt on this branch that have no result, in order of steps."""
        for step in self.history.pending:
            if not self.life.ranks.decide(lambda step=step: self._is_lost(step)):
                continue
            if step == self.progress.position:
                self._evaluate(step)
            else:
                self._give_up(step, "its snapshot is gone")
        self._post()

    def _is_lost(self, step: int) -> bool:
        """Whether nothing is left of a requested evaluation. Its result is received at once."""
        result = self.requests.read(self.requests.for_step(step))
        if result is not None:
            self._receive([result])
        elif self.snapshots is not None and self._has_snapshot(step):
            self._to_post.append(step)
        else:
            return True
        return False

    def _has_snapshot(self, step: int) -> bool:
        return path_of(self.life.run, "snapshot", step).is_dir()

    def _give_up(self, step: int, reason: str, status: Status = "failed") -> None:
        """Withdraw the request for a step, on the first rank."""
        if self.life.ranks.first:
            self._receive(self.requests.withdraw(self.requests.for_step(step), status, reason))

    def _poll(self) -> None:
        """Post requests for new snapshots and receive new results."""
        if self.snapshots is not None:
            self._published(self.snapshots.outcomes())
        now = time.monotonic()
        if self.life.ranks.first and now >= self._next_poll:
            self._next_poll = now + POLL
            results, warnings = self.requests.poll()
            self._warn(*warnings)
            self._receive(results)
            if self.best.awaited is not None:
                self._name_best(self.best.awaited)
        self._post()

    def _published(self, outcomes: Iterable[SaveOutcome]) -> None:
        for outcome in outcomes if self.life.ranks.first else ():
            if outcome.path is None:
                self._give_up(outcome.step, f"no snapshot: {outcome.error}")
                continue
            fields = {"step": outcome.step, "blocked_seconds": outcome.blocked_seconds}
            self.life.events.emit("snapshot", fields)
            self._to_post.append(outcome.step)

    def _post(self) -> None:
        """Post the requests whose snapshots are there. Where results decide, the step to compare with follows
        from those that count by then and no other: so a request is posted when they are in.
        """
        for step in sorted(self._to_post) if self.life.ranks.first else ():
            lag = self.requests.lag
            if not lag or all(one > step - lag for one in self.history.pending):
                self._to_post.remove(step)
                self._receive(self.requests.post(self.requests.for_step(step)))

    def _receive(self, results: Iterable[EvaluationResult]) -> None:
        """Record results."""
        for result in results:
            where = "inline" if self.inline is not None else self.plan.evaluate_where
            fields = {"where": where, "taken_at": self.progress.position}
            self.life.events.emit("eval", {**result.event(), **fields})
            if result.exam_id != self.requests.exam_id:  # a finalist's
                self._finalists[result.step] = result
                continue
            if self.budget is not None:
                self.budget.received(result)
            if result.status == "done" and result.reason is not None:
                self._warn(f"evaluation of step {result.step}: {result.reason}")
            self.history.scored[result.step] = score_step(result, self.history.scored)
            if result.status == "done" and result.loss is not None:
                self.progress.losses[result.step] = result.loss
            self._keep_best()

    def _keep_best(self) -> None:
        """Name the best step, and delete snapshots that nobody will need. While another branch may still be
        resumed, its files stay as they are.
        """
        if not self.life.ranks.first or not self.branch.given_up:
            return
        prefix, margin = self.history.prefix, self.requests.section.margin
        self._name_best(best(prefix, margin))
        if self.snapshots is not None:
            later = self.history.scored.keys() - {one.step for one in prefix}  # they may still win
            baselines = self.requests.baselines(self.progress.position)
            steps = {*self.history.pending, *finalists(prefix, margin), *later, *baselines}
            keep_snapshots(self.life.run, steps)

    def _decide(self, interrupted: Interrupted) -> str | None:
        """Apply on all ranks what is due to be decided now."""
        due = self.decisions.due(self.progress.position)
        if due is not None:
            conclusions = self.life.ranks.decide(lambda: self._conclude(due, interrupted))
            if conclusions is not None:  # else a signal: it is decided when the run goes on
                self.decisions.apply(conclusions)
        return self.decisions.stopped

    def _conclude(self, step: int, interrupted: Interrupted) -> dict[str, Any] | None:
        """Decide by the results up to `step`, once they are in. None if the run is interrupted before."""

        def missing() -> list[int]:
            return [one for one in self.history.pending if one <= step]

        ends = time.monotonic() + self.requests.timeout
        while not self._wait(missing, ends, interrupted):
            if interrupted():
                return None
            self._give_up(missing()[0], "nobody evaluated it in time", "timeout")
        conclusions, sentences = self.decisions.conclude(step, self.progress.position)
        self._log_decisions(*sentences)
        return conclusions

    def _wait(self, missing: Callable[[], list[int]], ends: float, interrupted: Interrupted) -> bool:
        """Whether nothing is missing any more at the time `ends`."""
        next_warning, quiet = time.monotonic() + QUIET, QUIET
        while steps := missing():
            now = time.monotonic()
            if now > ends or interrupted():
                return False
            if now > next_warning:
                quiet *= 4
                next_warning = now + quiet
                hint = "" if self.requests.evaluator else f": `evaluate {self.life.run} --follow` makes them"
                left = f"{ends - now:.0f} s more at the most"
                self._warn(f"waiting for evaluations of steps {steps}, {left}{hint}")
            time.sleep(PAUSE)
            self._next_poll = 0.0
            self._poll()
        return True

    def _wait_for_the_rest(self, interrupted: Interrupted) -> None:
        """On the first rank: wait for results that are still to come, then name the best."""
        self._poll()
        followed = any(one.status == "done" for one in self.history.scored.values())
        patience = self.requests.section.patience if self.requests.evaluator or followed else 0.0
        ends = time.monotonic() + patience
        if self._wait(lambda: self.history.pending, ends, interrupted):
            self._name_best(self._winner(ends, interrupted))
        else:
            hint = f"`evaluate {self.life.run} --follow` does it now"
            self._warn(f"not evaluated at the end: steps {self.history.pending}; {hint}")

    def _winner(self, ends: float, interrupted: Interrupted) -> int | None:
        """The best of the finalists, on all held-out samples if their weights are still there."""
        prefix, margin = self.history.prefix, self.requests.section.margin
        steps, leader = finalists(prefix, margin), best(prefix, margin)
        there = self.snapshots is not None and all(map(self._has_snapshot, steps))
        if self.on_all_samples or len(steps) < 2 or not there or self.requests.given_up:
            return leader
        for step in steps:
            self._receive(self.requests.post(self.requests.for_finalist(step)))
        self._wait(lambda: [step for step in steps if step not in self._finalists], ends, interrupted)
        losses = {step: one.loss for step, one in self._finalists.items() if one.loss is not None}
        if losses.keys() != set(steps):
            return leader
        winner = min(losses, key=lambda step: (losses[step], step))
        figures = ", ".join(f"step {step} {loss:.4f}" for step, loss in sorted(losses.items()))
        self._log_decisions(f"the best is step {winner}: on all held-out samples {figures}")
        return winner

    def _name_best(self, step: int | None) -> None:
        """On the first rank, write which step is the best. None is while only the beginning has a result."""
        if not self.life.ranks.first:
            return
        try:
            self.best.name(step if self.history.losses.keys() - {0} else None)
        except OSError as error:
            self._warn(f"which weights are the best cannot be written: {error.strerror}")

    def _warn(self, *sentences: str) -> None:
        for sentence in sentences:
            self.life.events.emit("warning", {"said": sentence})

    def _log_decisions(self, *sentences: str) -> None:
        for sentence in sentences:
            self.life.events.emit("decision", {"step": self.progress.position, "said": sentence})


def evaluation_of(
    settled: Settled, model: Decoder, mover: Mover, progress: Progress, branch: Branch, budget: Budget | None
) -> Evaluation | None:
    """Inline on the trainer's own weights, or by snapshots for an evaluator; None without held-out data."""
    config, plan, life = settled.config, settled.plan, branch.life
    ranks, run = life.ranks, life.run
    best = BestWeights(run)
    if settled.inputs.dev is None or not plan.evaluate_every:
        ranks.decide(best.clear)  # of an earlier attempt
        return None
    exam, section = exam_of(config, plan, settled.inputs), config.evaluate
    evaluator, inline = None, plan.evaluate_where == "inline"
    if plan.evaluate_where == "beside":
        if ranks.first:
            try:
                evaluator = start_beside(run, plan, section)
            except UserError as error:
                life.warn(f"evaluations run inline, and training waits: {error}")
        inline = ranks.decide(lambda: evaluator is None)
        if inline and budget is not None:
            budget.share = 1.0
    lag = plan.evaluate_every if section.lag == "auto" else section.lag
    requests = Requests(
        run=run,
        exam_id=exam.id,
        section=section,
        history=progress.judging,
        attempt=settled.attempt,
        lag=lag if section.decides else 0,
        evaluator=evaluator,
        expected=plan.evaluate_seconds,
    )
    snapshots = Checkpointer(run, rank=ranks.rank, ranks=ranks.count, run_id=settled.run_id, kind="snapshot")
    facts = {"template": plan.template, "method": config.adapt.method}

    def snapshot(step: int) -> Save:
        weights = {WEIGHTS: resume_tensors(mover)[WEIGHTS]}
        return Save(step, settled.attempt, weights, {}, settled.prints, facts)

    return Evaluation(
        life=life,
        plan=plan,
        progress=progress,
        branch=branch,
        requests=requests,
        decisions=Decisions(section, progress.judging, lag),
        best=best,
        on_all_samples=exam.looks == (len(exam.order),),
        inline=GlmExaminer(exam, model, place=life.place, by={"where": "inline"}) if inline else None,
        snapshots=None if inline else snapshots,
        snapshot=snapshot,
        budget=budget,
    )
