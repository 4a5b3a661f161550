"""One trainer a run directory, which has to be writable. The lock dies with the process, so nothing has to be
cleaned up after a kill.
"""

import os
import socket
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from glm_accelerate.checkpoint.format import FOLDER
from glm_accelerate.runtime.env import launched
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.files import try_lock

LOCK = "lock"
PATIENCE = 30.0  # seconds that a job of several nodes waits for its own earlier ranks to end
OWN_FILES = (LOCK, "run_id", "config.yaml", "plan.json", "events.jsonl", "evals.jsonl")


@contextmanager
def only_trainer(run: Path) -> Generator[None, None, None]:
    """Holds the run directory; a UserError names who holds it already."""
    descriptor = os.open(run / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        place = launched()
        ends = time.monotonic() + (PATIENCE if place is not None and place.listener is not None else 0.0)
        while not try_lock(descriptor):
            if time.monotonic() >= ends:
                holder = os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip() or "another process"
                cure = "wait for it, or name another directory with --run"
                raise UserError(f"{holder} is training here", where=run, cure=cure)
            time.sleep(0.2)
        now = datetime.now(UTC)
        holder = f"process {os.getpid()} on {socket.gethostname()}, since {now:%Y-%m-%d %H:%M:%S} UTC,"
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)
        os.fsync(descriptor)  # other nodes read it
        yield
    finally:
        os.close(descriptor)


def make_ready(run: Path) -> bool:
    """The directory, its checkpoints and its files can be written: better found out now than after hours.
    Whether the directory is new.
    """
    folder = path = run / FOLDER
    try:
        new = not run.exists()
        run.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.mkdir(exist_ok=True, mode=0o700)
        for path in (folder, run):
            tempfile.TemporaryFile(dir=path).close()
        for path in filter(Path.exists, map(run.joinpath, OWN_FILES)):
            path.open("r+b").close()
    except OSError as error:
        cure = "make it writable, or name another directory with --run"
        raise UserError(f"no run can be kept here: {error.strerror}", where=path, cure=cure) from error
    return new


def take_lock(run: Path, held: ExitStack) -> None:
    """Lock a directory that can be written, for as long as the stack holds it."""
    new = make_ready(run)
    held.enter_context(only_trainer(run))
    if new:
        held.enter_context(_left_only_if_begun(run))


@contextmanager
def _left_only_if_begun(run: Path) -> Generator[None]:
    """A start that is refused before the run has anything of its own leaves no directory behind."""
    try:
        yield
    except UserError:
        with suppress(OSError):  # it is gone, or there is a checkpoint
            if sorted(path.name for path in run.iterdir()) == [FOLDER, LOCK]:
                (run / FOLDER).rmdir()
                (run / LOCK).unlink()
                run.rmdir()
        raise
