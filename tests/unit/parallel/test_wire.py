"""What launchers say to each other, over real sockets: in pieces, too late, and from strangers."""

import json
import socket
import sys
import time
from collections.abc import Generator

import pytest

from glm_accelerate.parallel.wire import LONGEST, Endpoint, Wire, interface_of, listen_beside
from glm_accelerate.runtime.errors import UserError

Pair = tuple[Wire, socket.socket]


@pytest.fixture
def pair() -> Generator[Pair]:
    """A wire, and the bare socket at its other end."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), 10) as theirs,
    ):
        wire = Wire(listener.accept()[0])
        yield wire, theirs
        wire.close()


def heard(wire: Wire) -> list[dict[str, object]]:
    """The next messages, or none once it is closed."""
    ends = time.monotonic() + 10
    while not (messages := wire.receive()) and not wire.closed and time.monotonic() < ends:
        time.sleep(0.001)
    return messages


def test_messages_come_whole_however_they_are_cut(pair: Pair) -> None:
    wire, other = pair
    other.sendall(b'{}\n{"Stop": ')
    assert wire.receive() == []
    assert wire.greeted
    other.sendall(b'{}}\n{"Over": {"code": 0}}\n{"')
    assert heard(wire) == [{"Stop": {}}, {"Over": {"code": 0}}]


def test_more_than_the_network_takes_is_sent_later(pair: Pair) -> None:
    wire, other = pair
    said = {"Ended": {"cause": "x" * (LONGEST - 100)}}
    began = time.monotonic()
    for _ in range(4):
        wire.send(said)
    assert time.monotonic() - began < 10  # it did not wait for a reader
    lines, got = 0, b""
    while lines < 4:
        wire.flush()
        got += other.recv(1 << 20)
        lines = got.count(b"\n")
    assert [json.loads(line) for line in got.splitlines()] == [said] * 4


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n", b"x" * (LONGEST + 1), b""]
)
def test_a_stranger_is_hung_up_on(said: bytes, pair: Pair) -> None:
    wire, other = pair
    other.settimeout(0)
    sent = 0
    while sent < len(said) and not wire.closed:
        sent += other.send(said[sent : sent + 4096])
        assert wire.receive() == []
    other.shutdown(socket.SHUT_WR)
    assert heard(wire) == []
    assert wire.closed
    assert not wire.greeted


def test_the_last_words_are_read_before_it_closes(pair: Pair) -> None:
    """Also where the other end still talks: a socket that is closed with words unread takes back its own."""
    wire, other = pair
    other.sendall(b"{}\n" * 100)
    wire.send({"Over": {"code": 75}})
    other.shutdown(socket.SHUT_WR)
    wire.farewell(10)
    assert other.makefile("rb").readline() == b'{"Over": {"code": 75}}\n'


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def test_only_the_named_address_listens_and_only_once() -> None:
    endpoint = Endpoint("127.0.0.1", free_port())
    listener = endpoint.listen()
    assert listener is not None
    with listener, listen_beside(listener) as store:
        assert listener.getsockname() == ("127.0.0.1", endpoint.port)
        assert store.getsockname()[0] == "127.0.0.1"
        assert endpoint.listen() is None  # somebody is there
        wire = endpoint.connect()
        assert wire is not None
        assert wire.there == "127.0.0.1"
        wire.close()
    assert endpoint.connect() is None


def test_another_machines_address_is_not_ours() -> None:
    assert Endpoint("192.0.2.1", 29500).listen() is None  # for documentation: nobody has it


@pytest.mark.parametrize("text", ["host", "host:", ":29500", "host:0", "host:65536", "host:port", ""])
def test_a_meeting_point_is_a_host_and_a_port(text: str) -> None:
    with pytest.raises(UserError, match="expected HOST:PORT"):
        Endpoint.of(text)


def test_an_address_of_ipv6_is_in_brackets() -> None:
    assert Endpoint.of("[::1]:29500") == Endpoint("::1", 29500)
    assert str(Endpoint("::1", 29500)) == "[::1]:29500"


def test_a_name_that_means_this_machine_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a machine's own name does where /etc/hosts has it at 127.0.1.1."""
    there = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: there)
    with pytest.raises(UserError, match="which no other can reach"):
        Endpoint("node-a", free_port()).listen()


def test_a_name_may_have_no_address_yet() -> None:
    endpoint = Endpoint("nowhere.invalid", 29500)
    assert not endpoint.known()
    assert endpoint.listen() is None
    assert endpoint.connect() is None


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.0.0.2") == "lo"
    assert interface_of("192.0.2.1") is None
