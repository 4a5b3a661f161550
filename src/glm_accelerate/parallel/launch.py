"""N processes on this machine: started, watched, and started again when one dies, here or on another node.

launcher (this file) -> ranks, each of which runs `entry(task)` and ends with an exit code
Signals are passed on and end the job; a silent rank is named, then killed. What follows for all is decided
in `nodes.py`. On one node, ranks meet in a file of this user's: nobody listens for them.
"""

import math
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from glm_accelerate.parallel import heartbeat
from glm_accelerate.parallel.nodes import Begin, End, Ended, Hub, Join, Order, Over, Stopping, Terms
from glm_accelerate.parallel.seats import Guest, Host, Several, say, seated
from glm_accelerate.parallel.wire import interface_of
from glm_accelerate.runtime import env
from glm_accelerate.runtime.errors import STOPPED_AT_ONCE, ExitCode, stop_signals

POLL = 0.2
GRACE = 30.0  # seconds for the others to end once a rank has failed
PARTED = 5.0  # ... and once a node is lost: what they wait for will not come
LIBRARIES = ("torch._dynamo", "transformers")  # that every rank loads: once where ranks are copies
GPUS = ("nvidiactl", "kfd", "dxg", "dri")  # in /dev: a module may wake its driver, which survives no fork

Entry = Callable[[Any], int]  # a module's own function, and plain data for it: both travel to the processes


def launch(
    entry: Entry,
    task: object,
    ranks: int,
    progress: Callable[[], int],
    final: int,
    load: Callable[[], None] | None = None,
    several: Several | None = None,
) -> int:
    """Runs `entry(task)` in `ranks` processes until it ends by itself. `progress`: the newest saved step;
    `final`: the exit code of a rank that has reported what is wrong, so that starting again is of no use;
    `load` imports what every rank needs, once and in this process, if they can be forked from it: without it
    they never are, as torch may have computed here already. `several`: together with other nodes.
    """
    env.share_cores(ranks)
    env.one_range()
    env.few_kernels()
    if several is not None:
        env.quiet_store()
    endpoint = None if several is None else several.endpoint
    terms, facts = (Terms(), {}) if several is None else (several.terms, several.facts)
    with tempfile.TemporaryDirectory(prefix="glm-accelerate-", ignore_cleanup_errors=True) as folder:
        env.share_signs(Path(folder))
        job = _Job(Path(folder), entry, task, ranks, final, fork=load is not None and can_fork())
        before = {number: signal.signal(number, job.stop) for number in stop_signals()}
        try:
            if job.fork and load is not None:
                load()
            while True:
                hub = Hub(job.name, terms, progress, final, facts)
                join = Join(env.node_name(), ranks, facts)
                with seated(endpoint, join, hub, lambda: job.stopping) as seat:
                    code = _take_part(job, seat)
                if code is not None:
                    return code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _take_part(job: "_Job", seat: Host | Guest | None) -> int | None:
    """Round after round, until the job is over: its exit code. None: the meeting point is lost, and is to be
    looked for again.
    """
    if seat is None:
        say(STOPPED_AT_ONCE)
        return ExitCode.STOPPED
    env.listen_on(interface_of(seat.here or "127.0.0.1"))
    while True:
        order = job.await_order(seat)
        if order is None:
            return ExitCode.STOPPED if job.stopping else None
        if words := order.why if isinstance(order, Over) else order.said:
            say(words)
        if isinstance(order, Over):
            return order.code
        ended = job.attempt(seat, order)
        seat.tell(ended)
        if ended.code == 0 and seat.lost:  # the ranks of all nodes are done together
            return 0


@dataclass(frozen=True, slots=True)
class _Meeting:
    """Where the ranks of one attempt meet: in a file, or in a store that the first of them serves."""

    start: Begin
    file: str | None
    address: str
    store: socket.socket | None  # where it listens, on its own node


@dataclass(slots=True)
class _Job:
    """What is run, and what the launcher remembers between attempts."""

    folder: Path  # of signs of life
    entry: Entry
    task: object
    ranks: int
    final: int
    fork: bool
    processes: list[BaseProcess] = field(default_factory=list[BaseProcess])  # by rank on this node
    first: int = 0  # the number of the first of them
    name: str = field(
        default_factory=lambda: secrets.token_hex(8)
    )  # of the job, once it has begun all nodes'
    stopping: bool = False
    told: bool = False  # the hub knows of it
    signalled: set[int | None] = field(default_factory=set[int | None])  # processes that were told to end
    named: set[int] = field(default_factory=set[int])
    unwritable: float = 0.0  # when no sign of life could be written the last time

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on: the ranks end their step and save. The second Ctrl-C ends them at once."""
        if self.stopping and number == signal.SIGINT:
            self._kill()
            shutil.rmtree(self.folder, ignore_errors=True)
            say(STOPPED_AT_ONCE)
            os._exit(ExitCode.STOPPED)
        self.stopping = True
        self._terminate()

    def await_order(self, seat: Host | Guest) -> Begin | Over | None:
        """What is next, now that nothing runs here; None if nobody can say."""
        while True:
            for order in self._poll(seat, []):
                if isinstance(order, Begin | Over):
                    return order
            if seat.lost:
                return None

    def attempt(self, seat: Host | Guest, start: Begin) -> Ended:
        """The job once, as far as it is this node's."""
        self.first, self.name = start.first, start.job
        env.name_job(start.job)
        with ExitStack() as held:
            file = None if seat.address else held.enter_context(_meeting_file(self.folder))
            try:
                self._start(_Meeting(start, file, seat.address, seat.store))
                if seat.store is not None:  # the first rank's alone
                    seat.store.close()
                return self._ended(seat)
            finally:
                self._kill()
                for process in self.processes:
                    process.join()
                self.processes.clear()
                self.signalled.clear()
                heartbeat.forget(self.folder)  # they may have other numbers next time

    def _poll(self, seat: Host | Guest, sentinels: list[int]) -> list[Order]:
        """Orders, if there are any; the hub hears of a signal that came."""
        if self.stopping and not self.told:
            self.told = True
            seat.tell(Stopping())
        return seat.poll(sentinels, POLL)

    def _start(self, meeting: _Meeting) -> None:
        """Ranks inherit this thread's signal mask: Ctrl-C reaches them when they are ready for it."""
        if self.fork and can_fork():
            context, blocked = get_context("fork"), stop_signals()  # until the launcher's handlers are off
        else:
            context, blocked = get_context("spawn"), [signal.SIGINT]
            resource_tracker.ensure_running()  # it would come with the first rank, and unblock it (3.11)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            for local in range(self.ranks):
                words = (self.entry, self.task, local, self.ranks, meeting)
                process = context.Process(target=_be_rank, args=words)
                process.start()
                self.processes.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if self.stopping:  # asked before all of them could be sent a signal
            self._terminate()

    def _ended(self, seat: Host | Guest) -> Ended:
        """Waits for all ranks of this node, and does meanwhile what the others say."""
        looked, ends, failed = time.monotonic(), math.inf, list[str]()
        asked = second = False  # whether others have asked to end; whether they failed first
        while running := [process for process in self.processes if process.is_alive()]:
            orders = self._poll(seat, [process.sentinel for process in running])
            slept = time.monotonic() - looked > heartbeat.QUIET  # we were stopped ourselves
            looked = time.monotonic()
            if not slept:
                self._watch()
            for order in orders:
                if isinstance(order, End) and order.second:
                    ends = min(ends, looked + 2 * GRACE)  # one of ours may be about to say what is wrong
                    continue
                asked = True
                if isinstance(order, End):
                    if order.why:
                        say(order.why)
                    ends = min(ends, looked + (PARTED if order.lost else GRACE))
                self._terminate()
            if not failed and (failed := self._failures(0, ExitCode.STOPPED, ExitCode.AFTER_ANOTHER)):
                self._terminate()  # a rank may wait for the failed one without a limit
                second = asked
                ends = min(ends, looked + GRACE)
            elif ends == math.inf and self._failures(0, ExitCode.STOPPED):
                ends = looked + 2 * GRACE  # the failed one still saves
            if looked > ends:
                self._kill()
        codes = [process.exitcode or 0 for process in self.processes]
        if self.final in codes:
            return Ended(self.final, "what is wrong is said there")
        if not failed and (failed := self._failures(0, ExitCode.STOPPED)):
            second = True
        if failed and not (self.stopping or asked):
            say(failed[0])
        return Ended(None, failed[0], second) if failed else Ended(max(codes))

    def _failures(self, *passed_over: int) -> list[str]:
        """Each rank that ended by another exit code than these, in words."""
        failures: list[str] = []
        for rank, process in enumerate(self.processes, self.first):
            code = process.exitcode
            if code is not None and code not in passed_over:
                how = _name_of(-code) if code < 0 else f"exit code {code}"
                failures.append(f"rank {rank} (process {process.pid}) ended by {how}")
        return failures

    def _watch(self) -> None:
        silent = [sign for sign in heartbeat.signs(self.folder) if sign.seconds >= heartbeat.QUIET]
        self.named &= {sign.process for sign in silent}
        if silent and not heartbeat.writable(self.folder):
            if not self.unwritable:
                say(f"no signs of life can be written to {self.folder}: until they can, none are missed")
            self.unwritable = time.monotonic()
        since = time.monotonic() - self.unwritable
        for sign in silent:
            seconds = min(sign.seconds, since)
            if seconds >= heartbeat.QUIET and sign.process not in self.named:
                self.named.add(sign.process)
                say(str(sign))
            elif seconds > heartbeat.LOST:
                say(f"killing rank {sign.rank}")
                self.processes[sign.rank - self.first].kill()
                heartbeat.forget(self.folder, sign.rank)

    def _terminate(self) -> None:
        """Once each: a second signal would kill a rank that is on its way out."""
        for process in self.processes:
            if process.pid not in self.signalled:
                self.signalled.add(process.pid)
                process.terminate()

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()


@contextmanager
def _meeting_file(folder: Path) -> Generator[str, None, None]:
    """A new file, in which the ranks of one attempt meet. In memory where the system has such files: a disk
    may be full, and a killed launcher leaves none behind.
    """
    if sys.platform == "linux":
        with os.fdopen(os.memfd_create("glm-accelerate")) as file:
            yield f"/proc/{os.getpid()}/fd/{file.fileno()}"
    else:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            yield file.name


def can_fork() -> bool:
    """Whether ranks may begin as copies of this process: it has no other thread, and there is no GPU."""
    only = threading.active_count() == 1
    return sys.platform == "linux" and only and not any(Path("/dev", name).exists() for name in GPUS)


def _be_rank(entry: Entry, task: object, local: int, ranks: int, meeting: _Meeting) -> NoReturn:
    """Run one rank in its new process, with signals handled as in a fresh one."""
    for number in stop_signals():
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*stop_signals()} - {signal.SIGINT})
    start = meeting.start
    if meeting.file is None:
        listener = None if meeting.store is None else meeting.store.detach()
        if listener is not None and local:  # the first rank's alone
            os.close(listener)
            listener = None
        env.meet_at(meeting.address, start.port, listener)
    elif sys.platform == "linux":  # so that it stays when the launcher is killed
        try:
            env.meet_in(f"/proc/self/fd/{os.open(meeting.file, os.O_RDWR | os.O_CLOEXEC)}")
        except OSError:  # it was killed before, and its number may be another process's now
            sys.exit(ExitCode.AFTER_ANOTHER)
    else:
        env.meet_in(meeting.file)
    env.take_place(start.first + local, start.count, local, ranks)
    if (torch := sys.modules.get("torch")) is not None and (threads := env.granted_threads()) is not None:
        torch.set_num_threads(threads)  # it was loaded before the cores were shared out
    sys.exit(entry(task))


def _name_of(number: int) -> str:
    """A signal's name; those for real time have none."""
    known = number in {one.value for one in signal.Signals}
    return signal.Signals(number).name if known else f"signal {number}"
