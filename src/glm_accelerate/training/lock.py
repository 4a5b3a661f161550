"""One trainer a run directory. The lock dies with the process: nothing has to be cleaned up after a kill."""

import fcntl
import os
import socket
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from glm_accelerate.checkpoint.format import FOLDER
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.training.directory import make_ready


@contextmanager
def only_trainer(run: Path) -> Generator[None, None, None]:
    """Holds the run directory; a UserError names who holds it already."""
    descriptor = os.open(run / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip() or "another process"
            raise UserError(
                f"{holder} is training here",
                where=run,
                cure="wait for it, or name another directory with --run",
            ) from error
        now = datetime.now(UTC)
        holder = f"process {os.getpid()} on {socket.gethostname()}, since {now:%Y-%m-%d %H:%M:%S} UTC,"
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)
        yield
    finally:
        os.close(descriptor)


def take_lock(run: Path, held: ExitStack) -> None:
    """Of a directory that can be written, for as long as the stack holds it."""
    new = not run.exists()
    make_ready(run)
    held.enter_context(only_trainer(run))
    if new:
        held.enter_context(_left_only_if_begun(run))


@contextmanager
def _left_only_if_begun(run: Path) -> Generator[None]:
    """A start that is refused before the run has anything of its own leaves no directory behind."""
    try:
        yield
    except UserError:
        if sorted(path.name for path in run.iterdir()) == [FOLDER, "lock"]:
            with suppress(OSError):  # there is a checkpoint
                (run / FOLDER).rmdir()
                (run / "lock").unlink()
                run.rmdir()
        raise
