"""Scores answers in processes of their own, while the next ones are generated: put -> workers -> scores.

A worker is a plain interpreter without torch. It ignores Ctrl-C, which is the parent's to handle, and ends
with its parent, however that ends. An error in one metric fails that metric and nothing else.
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
from glm_accelerate.runtime.child import end_with_parent, python_command
from glm_accelerate.runtime.errors import UserError

AHEAD = 16  # answers given to a worker before it has scored them
BACKLOG = 4096  # answers that wait here before `put` does
MOST_ENDS = 2  # of workers, until a metric is to blame
TERMINATING = 5.0  # seconds for a process that is about to end
STARTING = -1  # instead of a sample's number

Task = tuple[int, str, str]  # number, reference, answer


class Grader:
    """A context: put answers as they come, at the end take the scores. The number of processes changes only
    the time. `patience`: seconds that a worker may spend on one answer.
    """

    def __init__(self, metrics: Sequence[str], processes: int = 1, patience: float = 60.0) -> None:
        self.names = metric_names(metrics)
        self._processes, self._patience = processes, patience
        self._workers: list[_ScoringWorker] = []
        self._waiting: deque[Task] = deque()
        self._scores: dict[int, dict[str, float]] = {}
        self._missing = 0  # put, and not scored yet
        self._failures: dict[str, tuple[int, str]] = {}  # by metric: the first sample that it failed on
        self._ended = 0

    def __enter__(self) -> Self:
        if self.names:
            for _ in range(self._processes):
                self._start_worker(self.names)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_workers()

    def put(self, number: int, reference: str, answer: str) -> None:
        """Queue an answer. Returns at once, unless thousands wait already."""
        self._missing += 1
        self._waiting.append((number, reference, answer))
        self._work(0.0)
        while len(self._waiting) > BACKLOG:
            self._work(1.0)

    def scores(self) -> dict[int, dict[str, float]]:
        """The scores of every answer, by its number; without the metrics that failed."""
        while self._missing:
            self._work(1.0)
        kept = [name for name in self.names if name not in self._failures]
        return {
            number: {name: self._scores[number][name] for name in kept} for number in sorted(self._scores)
        }

    def failures(self) -> list[str]:
        """Why metrics have no scores: a line for each, with the first sample that it failed on."""
        return [
            str(UserError(what, where=name if number == STARTING else f"{name}, sample {number}"))
            for name, (number, what) in sorted(self._failures.items())
        ]

    def _work(self, seconds: float) -> None:
        """Receive scores and send out answers; wait for scores at most so long."""
        if all(name in self._failures for name in self.names):
            self._finish_without_scores()
        for worker in list(self._workers):
            self._fill(worker)
        sockets: dict[object, _ScoringWorker] = {worker.socket: worker for worker in self._workers}
        for socket in wait([worker.socket for worker in self._workers], seconds):
            self._receive(sockets.pop(socket))
        now = time.monotonic()
        for worker in sockets.values():
            if worker.tasks and now - worker.since > self._patience:
                self._replace(worker, f"said nothing for {self._patience:.0f} s")

    def _fill(self, worker: "_ScoringWorker") -> None:
        try:
            while self._waiting and len(worker.tasks) < AHEAD:
                worker.send(self._waiting[0])
                self._waiting.popleft()
        except OSError:
            self._replace(worker)

    def _receive(self, worker: "_ScoringWorker") -> None:
        try:
            number, scores, raised = worker.receive()
        except (EOFError, OSError):
            self._replace(worker)
            return
        for name, what in raised.items():
            self._fail(name, number, what)
        if number != STARTING:
            self._scores[number] = scores
            self._missing -= 1
        self._fill(worker)

    def _replace(self, worker: "_ScoringWorker", how: str | None = None) -> None:
        """Start another in its place, for its answers. A user's own metrics are blamed before ours."""
        how = how or worker.how_ended()
        worker.kill()
        self._workers.remove(worker)
        self._waiting.extendleft(reversed(worker.tasks))
        self._ended += 1
        if self._ended >= MOST_ENDS:
            self._ended = 0
            number = worker.tasks[0][0] if worker.tasks else STARTING
            alive = [name for name in self.names if name not in self._failures]
            for name in [name for name in alive if name not in BUILT_IN] or alive:
                self._fail(name, number, f"the process that scored it {how}")
        if alive := [name for name in self.names if name not in self._failures]:
            self._start_worker(alive)

    def _start_worker(self, names: Sequence[str]) -> None:
        """One more process. If the system has none left, the running ones do the work."""
        try:
            self._workers.append(_ScoringWorker(names))
        except OSError as error:
            for name in names if not self._workers else ():
                self._fail(name, STARTING, f"no process can be started to score it: {error.strerror}")

    def _fail(self, name: str, number: int, what: str) -> None:
        self._failures[name] = min((number, what), self._failures.get(name, (number, what)))

    def _finish_without_scores(self) -> None:
        """No metric is left that could be computed."""
        for number, _, _ in [*self._waiting, *(task for worker in self._workers for task in worker.tasks)]:
            self._scores[number] = {}
        self._stop_workers()
        self._waiting.clear()
        self._missing = 0

    def _stop_workers(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers.clear()


class _ScoringWorker:
    """One process, our end of its socket, and its answers that are not scored yet."""

    def __init__(self, names: Sequence[str]) -> None:
        self.tasks: deque[Task] = deque()
        self.since = time.monotonic()
        self.socket, theirs = Pipe()
        with theirs, _interrupts_blocked():
            self._process = subprocess.Popen(
                python_command(f"from {__name__} import serve; serve({theirs.fileno()})"),
                stdin=subprocess.DEVNULL,
                stdout=2,  # a metric may print, and our stdout is read by others
                pass_fds=[theirs.fileno()],
            )
        with suppress(OSError):  # it has ended already: the first task will show
            self.socket.send_bytes(json.dumps(list(names)).encode())

    def send(self, task: Task) -> None:
        if not self.tasks:
            self.since = time.monotonic()
        self.socket.send_bytes(json.dumps(task).encode())
        self.tasks.append(task)

    def receive(self) -> tuple[int, dict[str, float], dict[str, str]]:
        number, scores, raised = json.loads(self.socket.recv_bytes())
        self.since = time.monotonic()
        if number != STARTING:
            self.tasks.popleft()
        return number, scores, raised

    def how_ended(self) -> str:
        try:
            code = self._process.wait(TERMINATING)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def kill(self) -> None:
        self.socket.close()
        self._process.kill()
        self._process.wait()


@contextmanager
def _interrupts_blocked() -> Generator[None]:
    """A process that is started here never gets the signals of its group: it inherits the mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP, signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(descriptor: int) -> None:
    """A worker's main function: metrics, then answers until the other end closes."""
    end_with_parent()  # also during a metric that lets no other thread run, as a regular expression does
    with Connection(descriptor) as parent, suppress(EOFError, BrokenPipeError, ConnectionResetError):
        tasks: SimpleQueue[Any] = SimpleQueue()
        # Reading goes on while a metric sleeps: on systems without such a signal this is how it ends.
        Thread(target=_read, args=(parent, tasks), daemon=True).start()
        scorer = Scorer(tasks.get())
        parent.send_bytes(json.dumps([STARTING, {}, scorer.broken]).encode())
        while True:
            number, reference, answer = tasks.get()
            reply = json.dumps([number, *scorer(reference, answer)])
            with suppress(OSError):  # a metric's output appears at once, unless a disk is full
                sys.stdout.flush()
            parent.send_bytes(reply.encode())


def _read(parent: Connection, tasks: "SimpleQueue[Any]") -> None:
    with suppress(EOFError, OSError):
        while True:
            tasks.put(json.loads(parent.recv_bytes()))
    os._exit(0)
