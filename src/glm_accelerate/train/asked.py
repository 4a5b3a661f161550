"""Evaluations that are asked and not answered yet: the first rank's dealings with whoever evaluates.

post (a request in the ledger) -> claimed ... -> answered, or late: then a result says so in its place
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from glm_accelerate.config.schema import EvaluateSection
from glm_accelerate.evaluate.protocol import ledger
from glm_accelerate.evaluate.protocol.child import Beside
from glm_accelerate.evaluate.protocol.messages import EvaluationResult, Findings, Request, stem_of, whole_plan
from glm_accelerate.evaluate.statistics.decide import Status, best, comparable
from glm_accelerate.evaluate.statistics.intervals import Items
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.train.state import Judging

GIVEN_UP = "the evaluator ended again and again"
USUAL, LEAST = 10.0, 600.0  # an evaluation may take so many times the longest so far, and at least so long


@dataclass(slots=True)
class Asked:
    """`lag`: steps before a result counts, where results decide; 0: as soon as it is there."""

    run: Path
    plan: str  # the exam's
    section: EvaluateSection
    judging: Judging
    lag: int
    attempt: int
    beside: Beside | None = None  # the evaluator that this process has started
    threads: int = 1  # of that one, at the most
    expected: float = 0.0  # seconds of an evaluation, by the plan
    attempts: dict[int, int] = field(default_factory=dict[int, int])  # in which each step was asked
    _known: dict[str, Request] = field(default_factory=dict[str, Request])  # asked by an earlier attempt
    _waiting: dict[str, Request] = field(default_factory=dict[str, Request])  # by stem
    _since: dict[str, float] = field(default_factory=dict[str, float])  # when seen unclaimed last
    _longest: float = 0.0  # seconds

    def remember(self) -> None:
        """In which attempts the steps of this branch were asked."""
        found = ledger.listing(self.run)
        self._known = {request.stem: request for request in found.waiting}
        for one in (*found.results, *found.waiting):
            if one.plan == self.plan:
                self.attempts[one.step] = max(one.attempt, self.attempts.get(one.step, 0))
        for step in (*self.judging.asked, *self.judging.judged):
            self.attempts.setdefault(step, self.attempt)

    def answer_others(self) -> None:
        """What earlier attempts asked under another plan: nobody would hear it, and who evaluates under this
        one refuses it.
        """
        for request in ledger.waiting(self.run):
            if request.plan not in (self.plan, whole_plan(self.plan)):
                self.answer(request, "skipped", f"attempt {self.attempt} asks otherwise")

    def request(self, step: int) -> Request:
        """What is asked about a step, and which one it is compared with: the best of those that count."""
        stem = stem_of(step, self.plan, self.attempts[step])
        known = self._waiting.get(stem) or self._known.get(stem)
        if known is not None:
            return known
        until = step - self.lag if self.lag else step - 1
        found = best([one for one in self.judging.prefix if one.step <= until], self.section.margin)
        against = None if found is None else stem_of(found, self.plan, self.attempts[found])
        weights = None if found is None else _snapshot(found)
        return Request(step, self.plan, self.attempts[step], _snapshot(step), against, weights)

    def finalist(self, step: int) -> Request:
        """The same of all held-out samples."""
        return Request(step, whole_plan(self.plan), self.attempts[step], _snapshot(step), whole=True)

    def items(self, stem: str) -> Items | None:
        """What was measured of another step, if it can be read."""
        try:
            return ledger.read_items(self.run, stem)
        except UserError:
            return None

    @property
    def given_up(self) -> bool:
        """Whether the evaluator will not come back."""
        return self.beside is not None and self.beside.given_up

    def compared(self, position: int) -> set[int]:
        """Steps whose weights somebody may need to compare with: as it was asked, and where results decide,
        also as it will be, however late what is still to come.
        """
        stems = [request.against for request in self._waiting.values()]
        steps = {int(stem.partition("-")[0]) for stem in stems if stem is not None}
        if self.lag:
            until = min([*self.judging.pending, position + 1]) - self.lag
            steps |= {*comparable(self.judging.prefix, self.section.margin, until)}
        return steps

    def post(self, request: Request) -> list[EvaluationResult]:
        """Ask. One that still waits for its turn gives way, unless all are to be kept; returns those."""
        gone: list[EvaluationResult] = []
        # The beginning always waits: it is what all later steps are seen against.
        giving_way = [one for one in self._waiting.values() if one.step]
        if self.section.keep == "all" or self.section.decides or request.whole:
            giving_way = []
        try:
            for older in giving_way:
                with ledger.claim(self.run, older) as mine:
                    gone += self.answer(older, "skipped", f"step {request.step} is newer") if mine else []
            ledger.ask(self.run, request)
        except OSError as error:
            said = f"it could not be asked: {error.strerror}"
            return [
                *gone,
                EvaluationResult(request.step, request.plan, request.attempt, "failed", reason=said),
            ]
        self._waiting[request.stem] = request
        self._since[request.stem] = time.monotonic()
        return gone

    def answer(self, request: Request, status: Status, reason: str) -> list[EvaluationResult]:
        """In an evaluator's place. If one was faster, its answer counts."""
        return self.publish(
            Findings(EvaluationResult(request.step, request.plan, request.attempt, status, reason=reason))
        )

    def publish(self, findings: Findings) -> list[EvaluationResult]:
        """What stands in the ledger then. A full disk costs the file, never the training."""
        result = findings.result
        self._waiting.pop(result.stem, None)
        try:
            ledger.publish(self.run, findings)
            stands = ledger.read(self.run, result.stem)
        except (OSError, UserError) as error:
            return [replace(result, reason=f"{result.reason or 'measured'}; not written: {error}")]
        return [result if stands is None else stands]

    def read(self, request: Request) -> EvaluationResult | None:
        """The answer, if it is there."""
        try:
            result = ledger.read(self.run, request.stem)
        except UserError as error:  # damaged from outside
            result = EvaluationResult(
                request.step, request.plan, request.attempt, "failed", reason=str(error)
            )
        if result is not None:
            self._waiting.pop(request.stem, None)
            self._longest = max(self._longest, result.seconds)
        return result

    def look(self) -> tuple[list[EvaluationResult], list[str]]:
        """What has been answered since the last look, and what a person should know of the evaluator."""
        said = [] if self.beside is None else self.beside.look()
        if self.beside is not None:
            self.beside.share(self.threads if len(self._waiting) > 1 else 1)
        found = [
            result for request in list(self._waiting.values()) if (result := self.read(request)) is not None
        ]
        for request, status, reason in list(self._late()):
            if status == "timeout" and self.beside is not None:
                said += self.beside.kill(f"step {request.step}: {reason}", request.stem)
            found += self.answer(request, status, reason)
        if self.beside is not None:
            said += self.beside.urge(self.limit if self._lies_idle(self.beside) else None)
        return found, said

    @property
    def limit(self) -> float:
        """Seconds that one evaluation may take."""
        said = self.section.timeout
        return max(LEAST, USUAL * max(self._longest, self.expected)) if said == "auto" else said

    def close(self) -> None:
        """The evaluator ends, wherever it is; what it has claimed is free again."""
        if self.beside is not None:
            self.beside.close(0.0)

    def _lies_idle(self, beside: Beside) -> bool:
        """Whether something waits that nobody is at, and what our evaluator is at is nothing that waits."""
        waiting = self._waiting
        at = waiting.get(beside.at or "")
        if at is not None and ledger.is_claimed(self.run, at):
            return False
        return not all(ledger.is_claimed(self.run, request) for request in waiting.values())

    def _late(self) -> Iterator[tuple[Request, Status, str]]:
        """Those that will not be answered any more. One that waits for its turn has all the time."""
        now = time.monotonic()
        for request in self._waiting.values():
            if self.given_up:
                yield request, "failed", GIVEN_UP
            elif not ledger.is_claimed(self.run, request):
                self._since[request.stem] = now
            elif now - self._since[request.stem] > self.limit:
                yield request, "timeout", f"no result in {self.limit:g} s"


def _snapshot(step: int) -> str:
    return f"snapshots/snapshot-{step}"
