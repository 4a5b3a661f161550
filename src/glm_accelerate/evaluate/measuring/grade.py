"""Answers are scored in processes of their own, while the next ones are generated: put -> workers -> scores.

A worker is a plain interpreter: no torch, deaf to Ctrl-C, which is our parent's to answer, and it ends with
its parent, however that ends. What is wrong with one metric fails that metric and nothing else.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from threading import Thread
from typing import Any, Self

from glm_accelerate.evaluate.measuring.metrics import BUILT_IN, Scorer, metric_names
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.orphan import end_with_parent

AHEAD = 16  # answers handed to a worker before it has scored them
BACKLOG = 4096  # answers that wait here before `put` does
LIVES = 2  # so many workers may end before it is a metric's fault
LAST_WORDS = 5.0  # seconds for a process that is about to end
STARTING = -1  # instead of a sample's number

Task = tuple[int, str, str]  # number, reference, answer


class Grader:
    """A context: within it answers are put as they come, at its end scores are taken. The number of processes
    changes nothing but the time. `patience`: seconds that a worker may be silent over one answer.
    """

    def __init__(self, metrics: Sequence[str], processes: int = 1, patience: float = 60.0) -> None:
        self.names = metric_names(metrics)
        self._processes, self._patience = processes, patience
        self._crew: list[_Worker] = []
        self._waiting: deque[Task] = deque()
        self._scores: dict[int, dict[str, float]] = {}
        self._missing = 0  # put, and not scored yet
        self._faults: dict[str, tuple[int, str]] = {}  # of a metric: the first sample that it failed on
        self._ended = 0

    def __enter__(self) -> Self:
        if self.names:
            for _ in range(self._processes):
                self._hire(self.names)
        return self

    def __exit__(self, *_: object) -> None:
        self._dismiss()

    def put(self, number: int, reference: str, answer: str) -> None:
        """Have it scored. Returns at once, unless thousands of answers wait already."""
        self._missing += 1
        self._waiting.append((number, reference, answer))
        self._go_on(0.0)
        while len(self._waiting) > BACKLOG:
            self._go_on(1.0)

    def scores(self) -> dict[int, dict[str, float]]:
        """Of every answer that was put, by its number; without the metrics that failed."""
        while self._missing:
            self._go_on(1.0)
        kept = [name for name in self.names if name not in self._faults]
        return {
            number: {name: self._scores[number][name] for name in kept} for number in sorted(self._scores)
        }

    def troubles(self) -> list[str]:
        """Why a metric has no scores: a line for each, which names the first sample that it failed on."""
        return [
            str(UserError(what, where=name if number == STARTING else f"{name}, sample {number}"))
            for name, (number, what) in sorted(self._faults.items())
        ]

    def _go_on(self, seconds: float) -> None:
        """Take what is scored, hand out what waits; wait for either at most so long."""
        if all(name in self._faults for name in self.names):
            self._give_up()
        for worker in list(self._crew):
            self._fill(worker)
        sockets: dict[object, _Worker] = {worker.socket: worker for worker in self._crew}
        for socket in wait([worker.socket for worker in self._crew], seconds):
            self._take(sockets.pop(socket))
        now = time.monotonic()
        for worker in sockets.values():
            if worker.tasks and now - worker.since > self._patience:
                self._bury(worker, f"said nothing for {self._patience:.0f} s")

    def _fill(self, worker: "_Worker") -> None:
        try:
            while self._waiting and len(worker.tasks) < AHEAD:
                worker.give(self._waiting[0])
                self._waiting.popleft()
        except OSError:
            self._bury(worker)

    def _take(self, worker: "_Worker") -> None:
        try:
            number, scores, raised = worker.take()
        except (EOFError, OSError):
            self._bury(worker)
            return
        for name, what in raised.items():
            self._blame(name, number, what)
        if number != STARTING:
            self._scores[number] = scores
            self._missing -= 1
        self._fill(worker)

    def _bury(self, worker: "_Worker", how: str | None = None) -> None:
        """Another takes its place and its answers. Whoever wrote a metric is to blame before we are."""
        how = how or worker.obituary()
        worker.kill()
        self._crew.remove(worker)
        self._waiting.extendleft(reversed(worker.tasks))
        self._ended += 1
        if self._ended >= LIVES:
            self._ended = 0
            number = worker.tasks[0][0] if worker.tasks else STARTING
            alive = [name for name in self.names if name not in self._faults]
            for name in [name for name in alive if name not in BUILT_IN] or alive:
                self._blame(name, number, f"the process that scored it {how}")
        if alive := [name for name in self.names if name not in self._faults]:
            self._hire(alive)

    def _hire(self, names: Sequence[str]) -> None:
        """One more process. Where the system has none left, those that there are do the work."""
        try:
            self._crew.append(_Worker(names))
        except OSError as error:
            for name in names if not self._crew else ():
                self._blame(name, STARTING, f"no process can be started to score it: {error.strerror}")

    def _blame(self, name: str, number: int, what: str) -> None:
        self._faults[name] = min((number, what), self._faults.get(name, (number, what)))

    def _give_up(self) -> None:
        """No metric is left: nothing is to be waited for."""
        for number, _, _ in [*self._waiting, *(task for worker in self._crew for task in worker.tasks)]:
            self._scores[number] = {}
        self._dismiss()
        self._waiting.clear()
        self._missing = 0

    def _dismiss(self) -> None:
        for worker in self._crew:
            worker.kill()
        self._crew.clear()


class _Worker:
    """One process, our end of its socket, and what it has been given and not yet answered."""

    def __init__(self, names: Sequence[str]) -> None:
        self.tasks: deque[Task] = deque()
        self.since = time.monotonic()
        self.socket, theirs = Pipe()
        # It finds modules where we do, wherever that is.
        start = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve"
        with theirs, _deaf_to_interrupts():
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"{start}; serve({theirs.fileno()})"],
                stdin=subprocess.DEVNULL,
                stdout=2,  # a metric may print: what we print is read by others
                pass_fds=[theirs.fileno()],
            )
        with suppress(OSError):  # it has ended already: the first task tells
            self.socket.send_bytes(json.dumps(list(names)).encode())

    def give(self, task: Task) -> None:
        if not self.tasks:
            self.since = time.monotonic()
        self.socket.send_bytes(json.dumps(task).encode())
        self.tasks.append(task)

    def take(self) -> tuple[int, dict[str, float], dict[str, str]]:
        number, scores, raised = json.loads(self.socket.recv_bytes())
        self.since = time.monotonic()
        if number != STARTING:
            self.tasks.popleft()
        return number, scores, raised

    def obituary(self) -> str:
        try:
            code = self._process.wait(LAST_WORDS)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def kill(self) -> None:
        self.socket.close()
        self._process.kill()
        self._process.wait()


@contextmanager
def _deaf_to_interrupts() -> Generator[None]:
    """What is started here never hears what the whole group is sent, from its first instruction on: a mask is
    inherited.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP, signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(descriptor: int) -> None:
    """A worker's life."""
    end_with_parent()  # even under a metric that lets no other thread run, as a regular expression does
    with Connection(descriptor) as parent, suppress(EOFError, BrokenPipeError, ConnectionResetError):
        tasks: SimpleQueue[Any] = SimpleQueue()
        # Listening goes on while a metric sleeps or waits: where the system has no such end, this is it.
        Thread(target=_listen, args=(parent, tasks), daemon=True).start()
        scorer = Scorer(tasks.get())
        parent.send_bytes(json.dumps([STARTING, {}, scorer.broken]).encode())
        while True:
            number, reference, answer = tasks.get()
            said = json.dumps([number, *scorer(reference, answer)])
            with suppress(OSError):  # what a metric prints is seen at once, unless a disk is full
                sys.stdout.flush()
            parent.send_bytes(said.encode())


def _listen(parent: Connection, tasks: "SimpleQueue[Any]") -> None:
    with suppress(EOFError, OSError):
        while True:
            tasks.put(json.loads(parent.recv_bytes()))
    os._exit(0)
