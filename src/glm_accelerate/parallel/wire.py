"""What launchers say to each other: JSON, one object a line, over TCP. Nothing here waits for a network that
hangs: what cannot be sent now is sent later, and whoever has not been heard for long is lost.
"""

import fcntl
import ipaddress
import json
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from glm_accelerate.runtime.errors import UserError

BEAT = 1.0  # seconds between two signs of life
QUIET = 5.0  # seconds without one after which a node is named ...
LOST = 15.0  # ... and after which it is given up
CONNECT = 2.0  # seconds for an answer to a connection
LONGEST = 1 << 20  # bytes of a message: whoever sends more is none of ours
ADDRESS_OF = 0x8915  # Linux: the address of an interface


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the launchers meet, as the user named it."""

    host: str
    port: int

    @classmethod
    def of(cls, text: str) -> "Endpoint":
        """From HOST:PORT; an address of IPv6 is in brackets."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise UserError(
                f"--rendezvous is {text!r}, expected HOST:PORT", cure="--rendezvous 10.0.0.1:29500"
            )
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def listen(self) -> socket.socket | None:
        """A socket on that address alone; None where it is another machine's, or somebody listens there."""
        for family, _, _, _, address in self._resolved():
            loopback = ipaddress.ip_address(address[0]).is_loopback
            with suppress(OSError):
                listener = _bound(family, (str(address[0]), self.port))
                if loopback and not self._is_loopback():
                    listener.close()
                    what = f"{self.host} is {address[0]} on this machine, which no other can reach"
                    raise UserError(what, where="--rendezvous", cure="name this machine's own address")
                listener.setblocking(False)
                return listener
        return None

    def connect(self) -> "Wire | None":
        """A connection to whoever listens there."""
        try:
            return Wire(socket.create_connection((self.host, self.port), CONNECT))
        except OSError:
            return None

    def known(self) -> bool:
        """Whether the host has an address. In a cluster that comes up it may have none yet."""
        return bool(self._resolved())

    def _resolved(self) -> list[Any]:
        try:
            return socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except socket.gaierror:
            return []

    def _is_loopback(self) -> bool:
        with suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"


@dataclass(eq=False, slots=True)
class Wire:
    """One connection. A failure of any kind closes it."""

    socket: socket.socket
    here: str = ""  # our address, by which the other end is reached
    there: str = ""  # the other end's
    heard: float = field(default_factory=time.monotonic)
    closed: bool = False
    greeted: bool = False  # the other end speaks as we do
    _said: float = 0.0  # when a sign of life was sent the last time
    _out: bytes = b""
    _in: bytes = b""

    def __post_init__(self) -> None:
        self.socket.setblocking(False)
        try:
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.here, self.there = self.socket.getsockname()[0], self.socket.getpeername()[0]
        except OSError:
            self.close()

    @property
    def silent(self) -> float:
        """Seconds since anything was heard."""
        return time.monotonic() - self.heard

    def send(self, message: dict[str, Any]) -> None:
        """As much as the network takes now; the rest with the next call."""
        self._out += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        try:
            while self._out and not self.closed:
                self._out = self._out[self.socket.send(self._out) :]
        except BlockingIOError:
            return
        except OSError:
            self.close()

    def beat(self) -> None:
        """A sign of life, if it is time for one."""
        if time.monotonic() >= self._said + BEAT:
            self._said = time.monotonic()
            self.send({})
        else:
            self.flush()

    def receive(self) -> list[dict[str, Any]]:
        """All messages that have come, signs of life left out. What is no message closes it."""
        try:
            while not self.closed and (got := self.socket.recv(1 << 16)):
                self.heard = time.monotonic()
                self._in += got
                if len(self._in) > LONGEST:
                    break
            self.close()  # its end, or far too much
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                self.close()
        *lines, self._in = self._in.split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            self.close()
            return []
        self.greeted = self.greeted or bool(messages)
        return [message for message in messages if isinstance(message, dict) and message]

    def farewell(self, seconds: float) -> None:
        """Send what is left and close, once the other end has read it or that time is over."""
        ends = time.monotonic() + seconds
        while not self.closed and time.monotonic() < ends:
            self.flush()
            if not self._out:
                with suppress(OSError):
                    self.socket.shutdown(socket.SHUT_WR)
            self.receive()
            time.sleep(0.01)
        self.close()

    def close(self) -> None:
        self.closed = True
        with suppress(OSError):
            self.socket.close()


def listen_beside(listener: socket.socket) -> socket.socket:
    """A socket on the same address, at any free port."""
    return _bound(listener.family, (listener.getsockname()[0], 0))


def _bound(family: int, address: tuple[str, int]) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(128)
    except OSError:
        made.close()
        raise
    return made


def interface_of(address: str) -> str | None:
    """The name of the interface that has this address, where the system tells."""
    if sys.platform != "linux":
        return "lo0" if ipaddress.ip_address(address).is_loopback else None
    if ":" in address:
        return _interface_of_6(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                answer = fcntl.ioctl(asked, ADDRESS_OF, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    # 127.0.0.2 is the machine's own, too
    return "lo" if ipaddress.ip_address(address).is_loopback else None


def _interface_of_6(address: str) -> str | None:
    wanted = ipaddress.ip_address(address.partition("%")[0]).packed.hex()
    with suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as listed:
        for line in listed:
            digits, *_, name = line.split()
            if digits == wanted:
                return name
    return None
