"""Scores answers in a process of its own, while the next ones are generated: put -> worker -> scores.

The worker is a plain interpreter without torch. It ignores Ctrl-C, which is the parent's to handle, and ends
with its parent, however that ends. An error in one metric fails that metric and nothing else.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any, Self

from glm_accelerate.evaluate.measuring.metrics import BUILT_IN, Scorer, metric_names
from glm_accelerate.runtime.child import end_with_parent, how_ended, python_command
from glm_accelerate.runtime.errors import UserError

AHEAD = 16  # answers given to the worker before it has scored them
BACKLOG = 4096  # answers that wait here before `put` does
MOST_ENDS = 2  # of workers, until a metric is to blame
PATIENCE = 60.0  # seconds that a worker may spend on one answer
TERMINATING = 5.0  # seconds for a process that is about to end
STARTING = -1  # instead of a sample's number

Task = tuple[int, str, str]  # number, reference, answer


class Grader:
    """A context: put answers as they come, at the end take the scores."""

    def __init__(self, metrics: Sequence[str]) -> None:
        self.names = metric_names(metrics)
        self._worker: _ScoringWorker | None = None
        self._waiting: deque[Task] = deque()
        self._scores: dict[int, dict[str, float]] = {}
        self._failures: dict[str, tuple[int, str]] = {}  # by metric: the first sample that it failed on
        self._ended = 0  # workers, since the last metric was blamed

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def put(self, number: int, reference: str, answer: str) -> None:
        """Queue an answer. Returns at once, unless thousands wait already."""
        self._waiting.append((number, reference, answer))
        self._work(0.0)
        while len(self._waiting) > BACKLOG:
            self._work(1.0)

    def scores(self) -> dict[int, dict[str, float]]:
        """The scores of every answer, by its number; without the metrics that failed."""
        while self._waiting or (self._worker is not None and self._worker.tasks):
            self._work(1.0)
        return {
            number: {name: self._scores[number][name] for name in self._left}
            for number in sorted(self._scores)
        }

    def failures(self) -> list[str]:
        """Why metrics have no scores: a line for each, with the first sample that it failed on."""
        return [
            str(UserError(what, where=name if number == STARTING else f"{name}, sample {number}"))
            for name, (number, what) in sorted(self._failures.items())
        ]

    @property
    def _left(self) -> list[str]:
        """The metrics that have not failed."""
        return [name for name in self.names if name not in self._failures]

    def _work(self, seconds: float) -> None:
        """Send answers to the worker and receive a score; wait for that at most so long."""
        if not self._left:
            self._stop()
        worker = self._worker
        if worker is None:
            self._scores |= {number: {} for number, _, _ in self._waiting}
            self._waiting.clear()
            return
        try:
            while self._waiting and len(worker.tasks) < AHEAD:
                worker.send(self._waiting[0])
                self._waiting.popleft()
            if worker.socket.poll(seconds):
                number, scores, raised = worker.receive()
                for name, what in raised.items():
                    self._fail(name, number, what)
                if number != STARTING:
                    self._scores[number] = scores
            elif worker.tasks and time.monotonic() - worker.since > PATIENCE:
                self._replace(worker, f"said nothing for {PATIENCE:.0f} s")
        except (EOFError, OSError):
            self._replace(worker, worker.how_ended())

    def _replace(self, worker: "_ScoringWorker", how: str) -> None:
        """Start another for its answers. A user's own metrics are blamed before ours."""
        number = worker.tasks[0][0] if worker.tasks else STARTING
        self._stop()
        self._ended += 1
        if self._ended >= MOST_ENDS:
            self._ended = 0
            for name in [name for name in self._left if name not in BUILT_IN] or self._left:
                self._fail(name, number, f"the process that scored it {how}")
        self._start()

    def _start(self) -> None:
        try:
            self._worker = _ScoringWorker(self._left) if self._left else None
        except OSError as error:
            for name in self._left:
                self._fail(name, STARTING, f"no process can be started to score it: {error.strerror}")

    def _stop(self) -> None:
        """End the worker. What it has not scored waits again."""
        if self._worker is not None:
            self._waiting.extendleft(reversed(self._worker.tasks))
            self._worker.kill()
        self._worker = None

    def _fail(self, name: str, number: int, what: str) -> None:
        self._failures[name] = min((number, what), self._failures.get(name, (number, what)))


class _ScoringWorker:
    """One process, our end of its socket, and its answers that are not scored yet."""

    def __init__(self, names: Sequence[str]) -> None:
        self.tasks: deque[Task] = deque()
        self.since = time.monotonic()
        self.socket, theirs = Pipe()
        # A process that is started while signals are blocked never gets those of its group.
        signals = {signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    python_command(f"from {__name__} import serve; serve({theirs.fileno()})"),
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # a metric may print, and our stdout is read by others
                    pass_fds=[theirs.fileno()],
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
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
            return f"ended ({how_ended(self._process.wait(TERMINATING))})"
        except subprocess.TimeoutExpired:
            return "closed its socket"

    def kill(self) -> None:
        self.socket.close()
        self._process.kill()
        self._process.wait()


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
