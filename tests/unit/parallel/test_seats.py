"""Launchers at the meeting point and away from it, over real sockets in one process."""

import socket
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack

import pytest

from glm_accelerate.parallel import wire
from glm_accelerate.parallel.nodes import Begin, End, Ended, Hub, Join, Order, Over, Stop, Stopping, Terms
from glm_accelerate.parallel.seats import Guest, Host, seated
from glm_accelerate.parallel.wire import Endpoint

FACTS = {"torch": "2.13.0"}
FINAL, STOPPED = 2, 75
Seat = Host | Guest


@pytest.fixture
def sit() -> Generator[Callable[..., Seat]]:
    """sit(name, nodes=(1, 2)): a launcher of that name takes its seat; the first one is the host."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        endpoint = Endpoint("127.0.0.1", found.getsockname()[1])
    there: list[Seat] = []
    with ExitStack() as held:

        def do(name: str, nodes: tuple[int, int] = (2, 2), facts: dict[str, str] = FACTS) -> Seat:
            if there:  # connected to by hand, so that one thread can play both
                line = endpoint.connect()
                assert line is not None
                line.send({"Join": {"name": name, "ranks": 1, "facts": facts}})
                seat: Seat | None = Guest(endpoint, line, line.there, line.here, [])
                held.callback(line.close)
            else:
                seat = held.enter_context(
                    seated(
                        endpoint,
                        Join(name, 1, facts),
                        Hub("job", Terms(*nodes), int, FINAL, facts),
                        lambda: False,
                    )
                )
            assert seat is not None
            there.append(seat)
            return seat

        yield do
        for seat in there:
            if isinstance(seat, Host):
                seat.drop()
                seat.guests.clear()


def hear(kind: type[Order], *seats: Seat) -> list[Order]:
    """The first order of that kind that each of them gets; all of them listen meanwhile."""
    got: dict[int, Order] = {}
    ends = time.monotonic() + 20
    while len(got) < len(seats) and time.monotonic() < ends:
        for number, seat in enumerate(seats):
            for order in seat.poll([], 0.01):
                if isinstance(order, kind):
                    got.setdefault(number, order)
    return [got[number] for number in range(len(seats))]


def test_they_begin_together_and_hear_how_it_ended(sit: Callable[..., Seat]) -> None:
    host, guest = sit("A"), sit("B")
    first, second = hear(Begin, host, guest)
    assert isinstance(first, Begin)
    assert isinstance(second, Begin)
    assert (first.first, second.first, first.count) == (0, 1, 2)
    assert first.port == second.port
    with socket.create_connection((guest.address, second.port), 10):  # the first rank's socket is there
        pass
    guest.tell(Stopping())
    assert hear(Stop, host, guest) == [Stop(), Stop()]
    host.tell(Ended(STOPPED))
    guest.tell(Ended(STOPPED))
    assert hear(Over, host, guest) == [Over(STOPPED), Over(STOPPED)]


def test_whoever_is_silent_is_lost(sit: Callable[..., Seat], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection stands: nothing else tells. Back again, it hears that it was given up."""
    monkeypatch.setattr(wire, "QUIET", 0.1)
    monkeypatch.setattr(wire, "LOST", 0.4)
    monkeypatch.setattr(wire, "BEAT", 0.05)
    host, guest = sit("A", (1, 2)), sit("B", (1, 2))
    hear(Begin, host, guest)
    assert hear(End, host) == [End("node B is lost", lost=True)]
    (told,) = hear(End, guest)
    assert isinstance(told, End)
    assert told.lost
    assert guest.lost


def test_a_host_that_is_silent_is_lost(sit: Callable[..., Seat], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "LOST", 0.4)
    monkeypatch.setattr(wire, "BEAT", 0.05)
    host, guest = sit("A"), sit("B")
    hear(Begin, host, guest)
    (told,) = hear(End, guest)
    assert isinstance(told, End)
    assert told.lost
    assert hear(End, host) == [End("node B is lost", lost=True)]


def test_a_host_that_slept_loses_nobody_who_went_on_talking(
    sit: Callable[..., Seat], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, guest = sit("A"), sit("B")
    hear(Begin, host, guest)
    assert isinstance(guest, Guest)
    guest.line.send({})
    monkeypatch.setattr(wire, "LOST", 0.2)
    time.sleep(0.3)
    guest.line.send({})
    assert host.poll([], 0.05) == []


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b'{"Join": {}}\n', b'{"Stopping": {}}\n'])
def test_a_stranger_changes_nothing(said: bytes, sit: Callable[..., Seat]) -> None:
    host, guest = sit("A"), sit("B")
    hear(Begin, host, guest)
    assert isinstance(host, Host)
    assert host.listener is not None
    with socket.create_connection((host.address, host.listener.getsockname()[1]), 10) as stranger:
        stranger.sendall(said)
        ends = time.monotonic() + 10
        while len(host.guests) != 1 and time.monotonic() < ends:
            assert host.poll([], 0.01) == []
    assert host.poll([], 0.05) == []
    guest.tell(Stopping())
    assert hear(Stop, host, guest) == [Stop(), Stop()]


def test_one_that_differs_is_refused(sit: Callable[..., Seat]) -> None:
    host, guest = sit("A"), sit("B", facts={"torch": "2.12.0"})
    why = "node B differs from A: torch 2.12.0, not 2.13.0"
    assert hear(Over, host, guest) == [Over(FINAL, why), Over(FINAL, why)]


def test_nobody_at_the_meeting_point_is_waited_for_until_a_stop() -> None:
    endpoint, hub = Endpoint("192.0.2.1", 29500), Hub("job", Terms(2, 2), int, FINAL, FACTS)
    asked = iter([False, True])
    with seated(endpoint, Join("A", 1, FACTS), hub, lambda: next(asked)) as seat:
        assert seat is None
