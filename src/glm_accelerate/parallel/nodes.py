"""Several launchers, one a node, as one job: who takes part, when ranks start, and when all of them end.

The launcher at the meeting point decides, and its node has the first rank: one node alone holds the run's
directory, so no two parts of a broken network go on with the same run. A single node is such a job, too.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from glm_accelerate.parallel.alike import differences
from glm_accelerate.runtime.errors import STOPPED_AT_ONCE, ExitCode

ATTEMPTS = 3  # in a row without progress, before a job is given up
LAST_CALL = 30.0  # seconds that a job which could start waits for more nodes
RETURN = 3.0  # ... and one that starts again
MEETING = 1800.0  # seconds that nodes are waited for: large machines take long to come up
LOOK = 1.0  # seconds between two looks for a new checkpoint


@dataclass(frozen=True, slots=True)
class Join:
    """A node has no ranks that run, and is ready to start some."""

    name: str
    ranks: int
    facts: Mapping[str, str]  # what has to be the same on all nodes


@dataclass(frozen=True, slots=True)
class Ended:
    """All ranks of a node have ended. `code`: what all returned, or None if one failed."""

    code: int | None
    cause: str = ""
    second: bool = False  # they failed because others had


@dataclass(frozen=True, slots=True)
class Stopping:
    """Somebody has asked a node to stop."""


@dataclass(frozen=True, slots=True)
class Begin:
    """A node's ranks begin: numbers from `first` on, of `count`, which meet at `port` of the first node."""

    first: int
    count: int
    nodes: int
    port: int
    job: str  # the name of all attempts together
    said: str


@dataclass(frozen=True, slots=True)
class End:
    """A node's ranks are to end: others are gone. `lost`: so is their machine, and nobody will answer.
    `second`: those others ended because of a failure that has yet to be reported, perhaps by these ranks.
    """

    why: str
    lost: bool = False
    second: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """A node's ranks are to end their step and save."""


@dataclass(frozen=True, slots=True)
class Over:
    """The job has ended."""

    code: int
    why: str = ""


Report = Join | Ended | Stopping
Order = Begin | End | Stop | Over
KINDS: dict[str, TypeAdapter[Report | Order]] = {
    kind.__name__: TypeAdapter(kind) for kind in (Join, Ended, Stopping, Begin, End, Stop, Over)
}


def to_message(said: Report | Order) -> dict[str, Any]:
    """As JSON has it."""
    return {type(said).__name__: asdict(said)}


def from_message(message: Mapping[str, Any]) -> Report | Order | None:
    """What was said; None if it is nothing that a launcher says."""
    if len(message) == 1:
        ((name, fields),) = message.items()
        if name in KINDS:
            with suppress(ValidationError):
                return KINDS[name].validate_python(fields)
    return None


@dataclass(frozen=True, slots=True)
class Terms:
    """What a job asks of its nodes."""

    least: int = 1  # nodes
    most: int = 1
    multiple: int = 1  # of which the number of ranks has to be one


@dataclass(eq=False, slots=True)
class Member:
    """A node that has joined. `tell` brings it an order."""

    name: str
    ranks: int
    tell: Callable[[Order], None]
    running: bool = False


@dataclass(slots=True)
class Hub:
    """Decides for all nodes. `progress`: the newest saved step; `final`: the exit code of a rank that has
    reported what is wrong; `meeting_port` makes the place where the ranks of one round meet.
    """

    name: str
    terms: Terms
    progress: Callable[[], int]
    final: int
    facts: Mapping[str, str]
    meeting_port: Callable[[], int] = int
    members: list[Member] = field(default_factory=list[Member])  # the hub's own node first
    over: bool = False
    _round: bool = False  # ranks run somewhere
    _rounds: int = 0
    _reached: int = 0  # the saved step at which this round began
    _failures: int = 0
    _reports: list[Ended] = field(default_factory=list[Ended])  # of this round
    _cause: str = ""  # of the failure of this round
    _stopping: bool = False
    _taking_in: bool = False
    _saved: int = 0  # the newest step when a node came to wait
    _looked: float = 0.0
    _idle: float = field(default_factory=time.monotonic)  # since when nothing runs
    _enough: float | None = None  # when there were enough nodes

    def join(self, member: Member, facts: Mapping[str, str]) -> None:
        """A node is ready. It starts with the others, or waits until they save."""
        name, again = member.name, 1
        while any(other.name == member.name for other in self.members):
            again += 1
            member.name = f"{name}#{again}"
        if odd := differences(facts, self.facts):
            what = f"node {member.name} differs from {self.members[0].name}: {odd}"
            refusal = Over(ExitCode.USERS_INPUT, what)
            if self._rounds:  # the others have nothing to do with it
                member.tell(refusal)
            else:
                self.members.append(member)
                self._end(refusal)
            return
        self.members.append(member)
        self._saved = self.progress() if self._round else 0

    def leave(self, member: Member) -> None:
        """A node is gone, without a word."""
        if member not in self.members:
            return
        self.members.remove(member)
        if member.running:
            cause = f"node {member.name} is lost"
            self._reports.append(Ended(None, cause))
            self._break_off(End(cause, lost=True))
            self._cause = self._cause or cause

    def ended(self, member: Member, report: Ended) -> None:
        """A node's ranks have ended."""
        member.running = False
        self._reports.append(report)
        if report.code is None or report.code == self.final:
            cause = "" if report.second else f"node {member.name}: {report.cause}"
            self._break_off(End(cause, second=report.second))
            self._cause = self._cause or cause

    def stop(self, member: Member) -> None:
        """Whoever takes part stops all; one that only waits leaves alone."""
        if self._round and not member.running and member is not self.members[0]:
            self.members.remove(member)
            member.tell(Over(ExitCode.STOPPED))
            return
        self._stopping = True
        self._stop_ranks()

    def tick(self) -> None:
        """What follows from what was reported, and from the time."""
        if self.over:
            return
        if self._round and not any(member.running for member in self.members):
            self._round = False
            self._idle = time.monotonic()
            self._conclude()
            self._reports.clear()
        if self.over:
            return
        if not self._round:
            self._start()
        elif not (self._taking_in or self._stopping):
            self._take_in()

    def _conclude(self) -> None:
        codes = [report.code for report in self._reports]
        if self.final in codes:
            self._end(Over(self.final, self._cause if self.terms.most > 1 else ""))
        elif self._stopping:
            self._end(Over(ExitCode.STOPPED, STOPPED_AT_ONCE if None in codes else ""))
        elif None not in codes:
            code = max(code for code in codes if code is not None)
            if not self._taking_in or code != ExitCode.STOPPED:
                self._end(Over(code))
        else:
            self._failures = 0 if self.progress() > self._reached else self._failures + 1
            if self._failures == ATTEMPTS:
                what = f"{ATTEMPTS} attempts in a row ended without getting further than step {self._reached}"
                cause = f" ({self._cause})" if self.terms.most > 1 and self._cause else ""
                self._end(Over(1, f"given up: {what}{cause}"))

    def _start(self) -> None:
        """As soon as all nodes are here, or enough and no more come."""
        if self._stopping:
            self._end(Over(ExitCode.STOPPED, STOPPED_AT_ONCE))
            return
        now, chosen = time.monotonic(), fitting(self.members, self.terms)
        if not chosen:
            self._enough = None
            if now > self._idle + MEETING:
                ranks = many(sum(member.ranks for member in self.members), "rank")
                came = f"{many(len(self.members), 'node')} with {ranks} came in {MEETING / 60:g} minutes"
                multiple = f", a multiple of {self.terms.multiple} ranks" if self.terms.multiple > 1 else ""
                self._end(Over(1, f"given up: {came}, of at least {self.terms.least}{multiple}"))
            return
        if self._enough is None:
            self._enough = now
        if len(self.members) < self.terms.most and now < self._enough + (
            RETURN if self._rounds else LAST_CALL
        ):
            return
        count, first, port = sum(member.ranks for member in chosen), 0, self.meeting_port()
        self._round, self._taking_in, self._enough = True, False, None
        self._rounds += 1
        self._reached = self._saved = self.progress()
        said = f"starting again from step {self._reached}" if self._rounds > 1 else ""
        if self.terms.most > 1:
            said = f"{said or 'starting'} with {many(count, 'rank')} on {many(len(chosen), 'node')}"
            waiting = len(self.members) - len(chosen)
            said += f", {many(waiting, 'node')} left over" if waiting else ""
            said += f" ({self._cause})" if self._cause else ""
        self._cause = ""
        for member in chosen:
            member.running = True
            member.tell(Begin(first, count, len(chosen), port, self.name, said))
            first += member.ranks

    def _take_in(self) -> None:
        """A node that waits and of which use can be made: the others stop at the next checkpoint."""
        running = sum(member.running for member in self.members)
        now = time.monotonic()
        if running == len(self.members) or running == self.terms.most or now < self._looked + LOOK:
            return
        self._looked = now
        if len(fitting(self.members, self.terms)) > running and self.progress() > self._saved:
            self._taking_in = True
            self._stop_ranks()

    def _stop_ranks(self) -> None:
        for member in self.members:
            if member.running:
                member.tell(Stop())

    def _break_off(self, order: End) -> None:
        for member in self.members:
            if member.running:
                member.tell(order)

    def _end(self, order: Over) -> None:
        self.over = True
        for member in self.members:
            member.tell(order)


def fitting(members: list[Member], terms: Terms) -> list[Member]:
    """The nodes that take part: as many as fit, the first of them the hub's own. Where all that could come
    are here and do not fit, all of them: the plan says what is wrong. Empty: more have to come.
    """
    ordered = [*members[:1], *sorted(members[1:], key=lambda member: -member.ranks)]
    for count in range(min(len(ordered), terms.most), terms.least - 1, -1):
        if sum(member.ranks for member in ordered[:count]) % terms.multiple == 0:
            return ordered[:count]
    return ordered[: terms.most] if len(ordered) >= terms.most else []


def many(count: int, what: str) -> str:
    """So many of these, in words."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
