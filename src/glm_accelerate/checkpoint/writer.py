"""The process that writes checkpoints behind the training, and the trainer's end of it.

The process needs no torch. It has a session of its own, so that a signal to the job's group leaves it alone,
and ends with its parent: the system kills it then, and the end of its input does too.
"""

import contextlib
import json
import mmap
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from glm_accelerate.checkpoint.meeting import Meeting, SaveFailed
from glm_accelerate.checkpoint.write import PieceEntry, SaveJob, write
from glm_accelerate.runtime.child import end_with_parent, how_ended, python_command
from glm_accelerate.runtime.errors import stop_signals

NICENESS = 5  # training goes first
PATIENCE = 5.0  # seconds for a process that is to end


class WriterEnded(Exception):
    """The writer process is no more."""


class WriterProcess:
    """A running writer that reads jobs and a copy of the state from two descriptors."""

    def __init__(self, job: int, data: int) -> None:
        command = python_command("from glm_accelerate.checkpoint.writer import main; main()")
        self._process = subprocess.Popen(
            [*command, str(job), str(data)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(job, data),
            start_new_session=True,
            bufsize=0,
        )
        self._received = b""

    def go(self) -> None:
        """Write the job at hand."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has just died: `answer` tells how
            self._process.stdin.write(b"\n")

    def answer(self, seconds: float) -> dict[str, Any] | None:
        """Its next answer; None if there is none in so many seconds."""
        assert self._process.stdout is not None
        ends = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._received:
                if not selector.select(max(0.0, ends - time.monotonic())):
                    return None
                received = os.read(self._process.stdout.fileno(), 1 << 16)
                if not received:
                    raise WriterEnded(self._how())
                self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """Let it go. It has nothing to do, or is not to be waited for any longer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process.stdout.close()

    def kill(self) -> None:
        """End it wherever it is, stopped or hung."""
        self._process.kill()
        self._process.wait()

    def _how(self) -> str:
        try:
            code = self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:  # it lives, but nothing more will come from it
            self.kill()
            code = -signal.SIGKILL
        return how_ended(code)


def main() -> None:
    """The process: what may end it is its parent's end, and nothing else."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    os.nice(NICENESS)
    _serve(int(sys.argv[1]), int(sys.argv[2]))


def _serve(job_file: int, data: int) -> None:
    """Write a checkpoint for each byte of input. The job's file has two lines: the pieces, and the job."""
    payload = memoryview(mmap.mmap(data, os.fstat(data).st_size, access=mmap.ACCESS_READ))
    for _ in _requests():
        began = time.perf_counter()
        lines = os.pread(job_file, os.fstat(job_file).st_size, 0).splitlines()
        pieces, job = json.loads(lines[0]), json.loads(lines[1])
        answer: dict[str, Any] = {"bytes": 0, "error": None}
        try:
            answer["bytes"] = write(
                SaveJob(meeting=Meeting(**job.pop("meeting")), **job),
                [_parse_piece(fields) for fields in pieces],
                lambda piece: payload[piece.begin : piece.begin + piece.bytes],
            )
        except SaveFailed as error:
            answer["error"] = str(error)
        sys.stdout.write(json.dumps({**answer, "seconds": time.perf_counter() - began}) + "\n")
        sys.stdout.flush()


def _parse_piece(fields: dict[str, Any]) -> PieceEntry:
    changed: dict[str, Any] = {key: tuple(fields[key]) for key in ("shape", "offset", "size")}
    changed["rows"] = tuple((start, stop) for start, stop in fields["rows"])
    return PieceEntry(**{**fields, **changed})


def _requests() -> Iterator[None]:
    """Once for each byte of input. Its end ends the process, whatever that is doing: nobody waits for it."""
    requests: queue.SimpleQueue[None] = queue.SimpleQueue()

    def listen() -> None:
        while os.read(sys.stdin.fileno(), 1):
            requests.put(None)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        yield requests.get()
