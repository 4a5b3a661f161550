"""The process that writes checkpoints behind the training: `python -m glm_accelerate.checkpoint.writer`.

It needs no torch. It has a session of its own, so that a signal to the job's group leaves it alone, and ends
with its parent: the system kills it then, and the end of its input does too.
"""

import json
import mmap
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from glm_accelerate.checkpoint.files import PieceEntry
from glm_accelerate.checkpoint.meeting import Meeting, SaveFailed
from glm_accelerate.checkpoint.write import SaveJob, write
from glm_accelerate.runtime.child import end_with_parent
from glm_accelerate.runtime.errors import stop_signals

NICENESS = 5  # training goes first


def parse_job(said: dict[str, Any]) -> SaveJob:
    """What `asdict` made of a job, back from JSON."""
    return SaveJob(meeting=Meeting(**said.pop("meeting")), **said)


def parse_parts(said: list[dict[str, Any]]) -> list[PieceEntry]:
    """What `asdict` made of parts, back from JSON."""
    boxes = ("shape", "offset", "size")
    parts: list[PieceEntry] = []
    for entry in said:
        fields: dict[str, Any] = {**entry, **{key: tuple(entry[key]) for key in boxes}}
        fields["rows"] = tuple((start, stop) for start, stop in entry["rows"])
        parts.append(PieceEntry(**fields))
    return parts


def serve(words: int, data: int) -> None:
    """Write a checkpoint for each byte of input, until it ends.

    `words` is a file of two lines: the parts, and the job at hand; `data` holds the copy.
    """
    payload = memoryview(mmap.mmap(data, os.fstat(data).st_size, access=mmap.ACCESS_READ))
    for _ in _tasks():
        began = time.perf_counter()
        parts, job = os.pread(words, os.fstat(words).st_size, 0).splitlines()
        answer: dict[str, Any] = {"bytes": 0, "error": None}
        try:
            answer["bytes"] = write(
                parse_job(json.loads(job)),
                parse_parts(json.loads(parts)),
                lambda part: payload[part.begin : part.begin + part.bytes],
            )
        except SaveFailed as error:
            answer["error"] = str(error)
        sys.stdout.write(json.dumps({**answer, "seconds": time.perf_counter() - began}) + "\n")
        sys.stdout.flush()


def _tasks() -> Iterator[None]:
    """Once for each byte of input. Its end ends the process, whatever that is doing: nobody waits for it."""
    tasks: queue.SimpleQueue[None] = queue.SimpleQueue()

    def listen() -> None:
        while os.read(sys.stdin.fileno(), 1):  # a byte is a task
            tasks.put(None)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        yield tasks.get()


def main() -> None:
    """Prepare the process: what may end it is its parent's end, and nothing else."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    os.nice(NICENESS)
    serve(int(sys.argv[1]), int(sys.argv[2]))


if __name__ == "__main__":
    main()
