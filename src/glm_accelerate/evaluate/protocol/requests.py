"""The trainer's side of the protocol: the requests of its first rank that have no result yet.

post (a request in the ledger) -> claimed by an evaluator ... -> its result, or one that says what failed
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from glm_accelerate.checkpoint.format import path_of
from glm_accelerate.config.schema import EvaluateSection
from glm_accelerate.evaluate.protocol import ledger
from glm_accelerate.evaluate.protocol.child import EvaluatorProcess
from glm_accelerate.evaluate.protocol.history import EvaluationHistory
from glm_accelerate.evaluate.protocol.messages import (
    EvaluationResult,
    Findings,
    Request,
    failure,
    full_exam_id,
    stem_of,
)
from glm_accelerate.evaluate.statistics.decide import Status, best, comparable
from glm_accelerate.runtime.errors import UserError

GIVEN_UP = "the evaluator ended again and again"
TIMES_LONGEST, SHORTEST_TIMEOUT = 10.0, 600.0  # the timeout of one evaluation: in longest ones, in seconds


@dataclass(slots=True)
class Requests:
    """What was requested of evaluators, by stem. `lag`: steps before a result counts, 0: at once."""

    run: Path
    exam_id: str
    section: EvaluateSection
    history: EvaluationHistory
    attempt: int
    lag: int
    evaluator: EvaluatorProcess | None = None  # that this process has started
    expected: float = 0.0  # seconds of an evaluation, by the plan
    at_most: int | None = None  # samples of those that are requested now
    attempts: dict[int, int] = field(default_factory=dict[int, int])  # in which each step was requested
    _earlier: dict[str, Request] = field(default_factory=dict[str, Request])  # posted by an earlier attempt
    _waiting: dict[str, Request] = field(default_factory=dict[str, Request])
    _unclaimed_at: dict[str, float] = field(default_factory=dict[str, float])  # when last seen so
    _longest: float = 0.0  # seconds of an evaluation so far

    def resume(self, *, first: bool) -> None:
        """Read which attempts requested the steps of this branch. The first rank withdraws what earlier
        attempts requested of another exam: an evaluator of this one refuses it.
        """
        listing = ledger.listing(self.run)
        self._earlier = {request.stem: request for request in listing.waiting}
        for one in (*listing.results, *listing.waiting):
            if one.exam_id == self.exam_id:
                self.attempts[one.step] = max(one.attempt, self.attempts.get(one.step, 0))
        for step in (*self.history.requested, *self.history.scored):
            self.attempts.setdefault(step, self.attempt)
        for request in listing.waiting if first else ():
            if request.exam_id not in (self.exam_id, full_exam_id(self.exam_id)):
                self.withdraw(request, "skipped", f"attempt {self.attempt} asks otherwise")

    def for_step(self, step: int) -> Request:
        """The request for a step. It is compared with the best of the steps that count by then."""
        stem = stem_of(step, self.exam_id, self.attempts[step])
        known = self._waiting.get(stem) or self._earlier.get(stem)
        if known is not None:
            return known
        until = step - self.lag if self.lag else step - 1
        leader = best([one for one in self.history.prefix if one.step <= until], self.section.margin)
        against = None if leader is None else stem_of(leader, self.exam_id, self.attempts[leader])
        weights = None if leader is None else self._snapshot(leader)
        return Request(
            step,
            self.exam_id,
            self.attempts[step],
            self._snapshot(step),
            against,
            weights,
            at_most=self.at_most,
        )

    def for_finalist(self, step: int) -> Request:
        """The request for a step on all held-out samples."""
        exam_id = full_exam_id(self.exam_id)
        return Request(step, exam_id, self.attempts[step], self._snapshot(step), whole=True)

    def baseline(self, step: int) -> tuple[str | None, list[float], list[float]]:
        """The stem of the result to compare with, its samples' losses and targets; None: none can be read."""
        stem = self.for_step(step).against
        try:
            losses = None if stem is None else ledger.read_sample_losses(self.run, stem)
        except UserError:
            losses = None
        if losses is None:
            return None, [], []
        return stem, losses.losses_N.tolist(), losses.targets_N.tolist()

    @property
    def given_up(self) -> bool:
        """Whether the evaluator will not come back."""
        return self.evaluator is not None and self.evaluator.given_up

    def baselines(self, position: int) -> set[int]:
        """Steps whose weights a comparison may still need: those of posted requests, and where results
        decide, those of later requests, however late the results that are to come.
        """
        stems = [request.against for request in self._waiting.values()]
        steps = {int(stem.partition("-")[0]) for stem in stems if stem is not None}
        if self.lag:
            until = min([*self.history.pending, position + 1]) - self.lag
            steps |= {*comparable(self.history.prefix, self.section.margin, until)}
        return steps

    def post(self, request: Request) -> list[EvaluationResult]:
        """Post a request. Older ones that nobody has claimed give way unless all are kept: returns their
        results.
        """
        withdrawn: list[EvaluationResult] = []
        # Step 0 never gives way: all later steps are compared with it.
        older = [one for one in self._waiting.values() if one.step]
        if self.section.keep == "all" or self.section.decides or request.whole:
            older = []
        try:
            for one in older:
                with ledger.claim(self.run, one) as claimed:
                    reason = f"step {request.step} is newer"
                    withdrawn += self.withdraw(one, "skipped", reason) if claimed else []
            ledger.post(self.run, request)
        except OSError as error:
            return [*withdrawn, failure(request, "failed", f"it could not be asked: {error.strerror}")]
        self._waiting[request.stem] = request
        self._unclaimed_at[request.stem] = time.monotonic()
        return withdrawn

    def withdraw(self, request: Request, status: Status, reason: str) -> list[EvaluationResult]:
        """Publish why a request is not evaluated. If an evaluator was faster, its result counts."""
        return self.publish(Findings(failure(request, status, reason)))

    def publish(self, findings: Findings) -> list[EvaluationResult]:
        """The result that is in the ledger then. A full disk costs the file, never the training."""
        result = findings.result
        self._waiting.pop(result.stem, None)
        try:
            ledger.publish(self.run, findings)
            published = ledger.read(self.run, result.stem)
        except (OSError, UserError) as error:
            return [replace(result, reason=f"{result.reason or 'measured'}; not written: {error}")]
        return [result if published is None else published]

    def read(self, request: Request) -> EvaluationResult | None:
        """The result, if it is there."""
        try:
            result = ledger.read(self.run, request.stem)
        except UserError as error:  # damaged from outside
            result = failure(request, "failed", str(error))
        if result is not None:
            self._waiting.pop(request.stem, None)
            self._longest = max(self._longest, result.seconds)
        return result

    def poll(self) -> tuple[list[EvaluationResult], list[str]]:
        """Results that are new, and warnings about the evaluator."""
        evaluator, warnings = self.evaluator, list[str]()
        if evaluator is not None:
            warnings += evaluator.poll()
        read = [self.read(request) for request in list(self._waiting.values())]
        results = [result for result in read if result is not None]
        for request, status, reason in list(self._overdue()):
            if status == "timeout" and evaluator is not None:
                warnings += evaluator.kill(f"step {request.step}: {reason}", request.stem)
            results += self.withdraw(request, status, reason)
        if evaluator is not None:
            warnings += evaluator.end_if_idle(self.timeout if self._is_idle(evaluator) else None)
        return results, warnings

    @property
    def timeout(self) -> float:
        """Seconds that one evaluation may take."""
        if self.section.timeout != "auto":
            return self.section.timeout
        return max(SHORTEST_TIMEOUT, TIMES_LONGEST * max(self._longest, self.expected))

    def _is_idle(self, evaluator: EvaluatorProcess) -> bool:
        """Whether a request waits unclaimed while the evaluator works on none of them."""
        current = self._waiting.get(evaluator.working_on or "")
        if current is not None and ledger.is_claimed(self.run, current):
            return False
        return not all(ledger.is_claimed(self.run, request) for request in self._waiting.values())

    def _overdue(self) -> Iterator[tuple[Request, Status, str]]:
        """Requests to give up, and why. One that is not claimed yet has all the time."""
        now = time.monotonic()
        for request in self._waiting.values():
            if self.given_up:
                yield request, "failed", GIVEN_UP
            elif not ledger.is_claimed(self.run, request):
                self._unclaimed_at[request.stem] = now
            elif now - self._unclaimed_at[request.stem] > self.timeout:
                yield request, "timeout", f"no result in {self.timeout:g} s"

    def _snapshot(self, step: int) -> str:
        return path_of(self.run, "snapshot", step).relative_to(self.run).as_posix()
