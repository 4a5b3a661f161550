"""A launcher's place among those of a job: at the meeting point, where the hub is, or connected to it.

`poll` waits for whatever comes first and returns orders for this node; `tell` reports to the hub.
"""

import os
import socket
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait

from glm_accelerate.parallel import wire
from glm_accelerate.parallel.nodes import (
    MEETING,
    Begin,
    End,
    Ended,
    Hub,
    Join,
    Member,
    Order,
    Over,
    Report,
    Stop,
    Stopping,
    Terms,
    from_message,
    many,
    to_message,
)
from glm_accelerate.parallel.wire import Endpoint, Wire, listen_beside
from glm_accelerate.runtime.errors import UserError

AGAIN = 0.5  # seconds between two attempts to reach the meeting point
FAREWELL = 2.0  # seconds for the last words to be read


@dataclass(eq=False, slots=True)
class Host:
    """At the meeting point. Without a listener, a job of one node."""

    hub: Hub
    own: Member
    orders: list[Order]
    listener: socket.socket | None = None
    store: socket.socket | None = None  # where this node's first rank listens for all others
    lost: bool = False
    guests: dict[Wire, Member | None] = field(default_factory=dict[Wire, Member | None])
    _named: set[Wire] = field(default_factory=set[Wire])

    @property
    def here(self) -> str:
        """Our address; empty if nobody else takes part."""
        return "" if self.listener is None else self.listener.getsockname()[0]

    @property
    def address(self) -> str:
        return self.here

    def tell(self, report: Report) -> None:
        if isinstance(report, Ended):
            self.hub.ended(self.own, report)
        elif isinstance(report, Stopping):
            self.hub.stop(self.own)

    def poll(self, sentinels: Sequence[int], seconds: float) -> list[Order]:
        listening = [] if self.listener is None else [self.listener]
        wait([*sentinels, *listening, *(line.socket for line in self.guests if not line.closed)], seconds)
        for listener in listening:
            self._accept(listener)
        for line in list(self.guests):
            self._hear(line)  # first: it may be us who did not listen
            self._watch(line)
        self.hub.tick()
        for line in self.guests:
            line.beat()
        orders = self.orders.copy()
        self.orders.clear()
        return orders

    def meeting_port(self) -> int:
        """A new port of this node, at which the next ranks meet."""
        if self.listener is None:
            return 0
        self.store = listen_beside(self.listener)
        return self.store.getsockname()[1]

    def close(self) -> None:
        for line in self.guests:
            line.farewell(FAREWELL)
        self.drop()

    def drop(self) -> None:
        """Close connections as they are, as a process does that has only copies of them."""
        for line in self.guests:
            line.close()
        if self.listener is not None:
            self.listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                found, _ = listener.accept()
            except OSError:
                return
            self.guests[Wire(found)] = None

    def _hear(self, line: Wire) -> None:
        for message in line.receive():
            report, member = from_message(message), self.guests[line]
            if isinstance(report, Join) and member is None:
                member = Member(report.name, report.ranks, lambda order: line.send(to_message(order)))
                self.guests[line] = member
                say(f"node {report.name} has joined, with {many(report.ranks, 'rank')}")
                self.hub.join(member, report.facts)
            elif isinstance(report, Ended) and member is not None:
                self.hub.ended(member, report)
            elif isinstance(report, Stopping) and member is not None:
                self.hub.stop(member)
            else:
                line.close()

    def _watch(self, line: Wire) -> None:
        member = self.guests[line]
        if not line.closed and line.silent > wire.LOST:
            line.close()
        if line.closed:
            del self.guests[line]
            self._named.discard(line)
            if member is not None:
                self.hub.leave(member)
        elif line.silent < wire.QUIET:
            self._named.discard(line)
        elif member is not None and line not in self._named:
            self._named.add(line)
            say(f"node {member.name} is silent for {line.silent:.0f} s")


@dataclass(eq=False, slots=True)
class Guest:
    """Connected to the hub, until one of them is gone."""

    endpoint: Endpoint
    line: Wire
    address: str  # where the first node is reached
    here: str  # this node's own
    orders: list[Order]  # that have come already
    store: socket.socket | None = None
    lost: bool = False

    def tell(self, report: Report) -> None:
        self.line.send(to_message(report))

    def poll(self, sentinels: Sequence[int], seconds: float) -> list[Order]:
        if self.lost:
            wait(sentinels, seconds)
            return []
        wait([*sentinels, *([] if self.line.closed else [self.line.socket])], seconds)
        orders = [*self.orders, *_orders(self.line)]
        self.orders.clear()
        self.line.beat()
        if self.line.closed or self.line.silent > wire.LOST:
            self.lost = True
            self.line.close()
            if not any(isinstance(order, Over) for order in orders):
                orders.append(End(f"the node at {self.endpoint} is lost", lost=True))
        return orders

    def close(self) -> None:
        self.line.farewell(FAREWELL)

    def drop(self) -> None:
        self.line.close()


@dataclass(frozen=True, slots=True)
class Several:
    """A job of several nodes, as this one joins it."""

    endpoint: Endpoint
    terms: Terms
    facts: Mapping[str, str]


@contextmanager
def seated(
    endpoint: Endpoint | None, join: Join, hub: Hub, stopping: Callable[[], bool]
) -> Generator[Host | Guest | None, None, None]:
    """A place in the job, while entered: with the hub at the meeting point, if its address is ours and nobody
    has it yet. None if a stop was asked for before anybody could be reached.
    """
    seat = _host(hub, join, None) if endpoint is None else _take(endpoint, join, hub, stopping)
    if seat is None:
        yield None
        return
    os.register_at_fork(after_in_child=seat.drop)  # so that connections end with this process
    try:
        yield seat
    finally:
        seat.close()


def _take(endpoint: Endpoint, join: Join, hub: Hub, stopping: Callable[[], bool]) -> Host | Guest | None:
    ends, told = time.monotonic() + MEETING, False
    while not stopping():
        if (listener := endpoint.listen()) is not None:
            say(f"this node, {join.name}, is the meeting point {endpoint}")
            return _host(hub, join, listener)
        if (guest := _guest(endpoint, join)) is not None:
            say(f"this node, {join.name}, has joined {endpoint}")
            return guest
        if not told:
            say(f"no launcher answers at {endpoint} yet{'' if endpoint.known() else ': it has no address'}")
            told = True
        if time.monotonic() > ends:
            what = f"no launcher answered in {MEETING / 60:g} minutes"
            cure = "start the launcher of the node that has this address, and look at its firewall"
            raise UserError(what, where=endpoint, cure=cure)
        time.sleep(AGAIN)
    return None


def _host(hub: Hub, join: Join, listener: socket.socket | None) -> Host:
    orders: list[Order] = []
    own = Member(join.name, join.ranks, orders.append)
    host = Host(hub, own, orders, listener)
    hub.meeting_port = host.meeting_port
    hub.join(own, hub.facts)
    return host


def _guest(endpoint: Endpoint, join: Join) -> Guest | None:
    """Joined, if it is a launcher that answers."""
    line = endpoint.connect()
    if line is None:
        return None
    there, here = line.there, line.here
    line.send(to_message(join))
    orders, ends = list[Order](), time.monotonic() + wire.CONNECT
    while not (line.greeted or line.closed) and time.monotonic() < ends:
        wait([line.socket], AGAIN)
        orders += _orders(line)
    if (line.closed and not orders) or not line.greeted:
        line.close()
        return None
    return Guest(endpoint, line, there, here, orders)


def _orders(line: Wire) -> list[Order]:
    heard = [from_message(message) for message in line.receive()]
    return [order for order in heard if isinstance(order, Begin | End | Stop | Over)]


def say(message: str) -> None:
    """A line of the launcher's. What it quotes from other nodes cannot move the cursor or add a line."""
    line = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in message)
    sys.stderr.write(f"launcher: {line}\n")
    sys.stderr.flush()
