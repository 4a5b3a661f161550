"""N processes on this machine: started, watched, and started again when one dies.

launcher (this file) -> ranks, each of which runs `entry(task)` and ends with an exit code
Signals are passed on and end the job; a silent rank is named, then killed; a job that fails again and again
without getting further is given up. Ranks meet in a file of this user's: nobody listens for them.
"""

import math
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from glm_accelerate.parallel import heartbeat
from glm_accelerate.runtime import env
from glm_accelerate.runtime.errors import STOPPED_AT_ONCE, ExitCode, stop_signals

ATTEMPTS = 3  # in a row without progress, before a job is given up
POLL = 0.2
GRACE = 30.0  # seconds for the others to end once a rank has failed
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
) -> int:
    """Runs `entry(task)` in `ranks` processes until it ends by itself. `progress`: the newest saved step;
    `final`: the exit code of a rank that has reported what is wrong, so that starting again is of no use;
    `load` imports what every rank needs, once and in this process, if they can be forked from it: without it
    they never are, as torch may have computed here already.
    """
    env.share_cores(ranks)
    env.one_range()
    env.stay_on_loopback()
    env.few_kernels()
    with tempfile.TemporaryDirectory(prefix="glm-accelerate-", ignore_cleanup_errors=True) as folder:
        env.share_signs(Path(folder))
        job = _Job(Path(folder), entry, task, ranks, final, fork=load is not None and can_fork())
        before = {number: signal.signal(number, job.stop) for number in stop_signals()}
        try:
            if job.fork and load is not None:
                load()
            return _repeat(job, progress)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _repeat(job: "_Job", progress: Callable[[], int]) -> int:
    """Attempt after attempt, as long as they get further."""
    failures = 0
    while True:
        reached = progress()
        code = job.attempt()
        if code is not None:
            return code
        if job.stopping:
            _say(STOPPED_AT_ONCE)
            return ExitCode.STOPPED
        failures = 0 if progress() > reached else failures + 1
        if failures == ATTEMPTS:
            _say(f"given up: {failures} attempts in a row ended without getting further than step {reached}")
            return 1
        _say(f"starting again from step {progress()}")


@dataclass(slots=True)
class _Job:
    """What is run, and what the launcher remembers between attempts."""

    folder: Path  # of signs of life
    entry: Entry
    task: object
    ranks: int
    final: int
    fork: bool
    processes: list[BaseProcess] = field(default_factory=list[BaseProcess])  # by rank
    stopping: bool = False
    named: set[int] = field(default_factory=set[int])
    unwritable: float = 0.0  # when no sign of life could be written the last time

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on: the ranks end their step and save. The second Ctrl-C ends them at once."""
        if self.stopping and number == signal.SIGINT:
            self._kill()
            shutil.rmtree(self.folder, ignore_errors=True)
            _say(STOPPED_AT_ONCE)
            os._exit(ExitCode.STOPPED)
        self.stopping = True
        self._terminate()

    def attempt(self) -> int | None:
        """The job once: its exit code, or None if a rank died."""
        with _meeting_point(self.folder) as meeting:
            try:
                self._start(meeting)
                return self._ended()
            finally:
                self._kill()
                for process in self.processes:
                    process.join()
                self.processes.clear()

    def _start(self, meeting: str) -> None:
        """Ranks inherit this thread's signal mask: Ctrl-C reaches them when they are ready for it."""
        if self.fork and can_fork():
            context, blocked = get_context("fork"), stop_signals()  # until the launcher's handlers are off
        else:
            context, blocked = get_context("spawn"), [signal.SIGINT]
            resource_tracker.ensure_running()  # it would come with the first rank, and unblock it (3.11)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            for rank in range(self.ranks):
                words = (self.entry, self.task, rank, self.ranks, meeting)
                process = context.Process(target=_be_rank, args=words)
                process.start()
                self.processes.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if self.stopping:  # asked before all of them could be sent a signal
            self._terminate()

    def _ended(self) -> int | None:
        """Waits for all ranks. The exit code of all, the final one of any, or None."""
        looked, ends, failed = time.monotonic(), math.inf, list[str]()
        while running := [process for process in self.processes if process.is_alive()]:
            wait([process.sentinel for process in running], POLL)
            slept = time.monotonic() - looked > heartbeat.QUIET  # we were stopped ourselves
            looked = time.monotonic()
            if not slept:
                self._watch()
            if not failed and (failed := self._failures(0, ExitCode.STOPPED, ExitCode.AFTER_ANOTHER)):
                self._terminate()  # a rank may wait for the failed one without a limit
                ends = looked + GRACE
            elif ends == math.inf and self._failures(0, ExitCode.STOPPED):
                ends = looked + 2 * GRACE  # the failed one still saves
            if looked > ends:
                self._kill()
        codes = [process.exitcode or 0 for process in self.processes]
        if self.final in codes:
            return self.final
        failed = failed or self._failures(0, ExitCode.STOPPED)
        if failed and not self.stopping:
            _say(failed[0])
        return None if failed else max(codes)

    def _failures(self, *passed_over: int) -> list[str]:
        """Each rank that ended by another exit code than these, in words."""
        failures: list[str] = []
        for rank, process in enumerate(self.processes):
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
                _say(f"no signs of life can be written to {self.folder}: until they can, none are missed")
            self.unwritable = time.monotonic()
        since = time.monotonic() - self.unwritable
        for sign in silent:
            seconds = min(sign.seconds, since)
            if seconds >= heartbeat.QUIET and sign.process not in self.named:
                self.named.add(sign.process)
                _say(str(sign))
            elif seconds > heartbeat.LOST:
                _say(f"killing rank {sign.rank}")
                self.processes[sign.rank].kill()
                heartbeat.forget(self.folder, sign.rank)

    def _terminate(self) -> None:
        for process in self.processes:
            process.terminate()

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()


@contextmanager
def _meeting_point(folder: Path) -> Generator[str, None, None]:
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


def _be_rank(entry: Entry, task: object, rank: int, ranks: int, meeting: str) -> NoReturn:
    """In a process of its own, which handles signals as any other that has just begun."""
    for number in stop_signals():
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*stop_signals()} - {signal.SIGINT})
    if sys.platform == "linux":  # so that it stays when the launcher is killed
        try:
            meeting = f"/proc/self/fd/{os.open(meeting, os.O_RDWR | os.O_CLOEXEC)}"
        except OSError:  # it was killed before, and its number may be another process's now
            sys.exit(ExitCode.AFTER_ANOTHER)
    env.take_place(rank, ranks, meeting)
    if (torch := sys.modules.get("torch")) is not None and (threads := env.granted_threads()) is not None:
        torch.set_num_threads(threads)  # it was loaded before the cores were shared out
    sys.exit(entry(task))


def _name_of(number: int) -> str:
    """A signal's name; those for real time have none."""
    known = number in {one.value for one in signal.Signals}
    return signal.Signals(number).name if known else f"signal {number}"


def _say(message: str) -> None:
    sys.stderr.write(f"launcher: {message}\n")
    sys.stderr.flush()
