"""Holding a checkpoint while it is read: a shared lock on its manifest. It ends with its holder, however that
ends, and needs no file of its own, so it works where the reader may not write.
"""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from glm_accelerate.checkpoint.format import MANIFEST, Damaged
from glm_accelerate.runtime.files import try_lock


@contextmanager
def lease(checkpoint: Path) -> Generator[Path]:
    """While this is held, `retain` leaves the checkpoint alone: in any process, of any user."""
    try:
        descriptor = os.open(checkpoint / MANIFEST, os.O_RDONLY)
    except OSError as error:
        raise Damaged(f"not a whole checkpoint: {error.strerror}", where=checkpoint) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits if it is just being deleted
        if not is_published(checkpoint, descriptor):
            raise Damaged("was deleted while it was being opened", where=checkpoint)
        yield checkpoint
    finally:
        os.close(descriptor)


@contextmanager
def sole(checkpoint: Path) -> Generator[bool]:
    """For whoever deletes: whether nobody holds it. Whoever wants to read it meanwhile waits."""
    descriptor = os.open(checkpoint / MANIFEST, os.O_RDWR)  # NFS wants to write for a lock like this
    try:
        yield try_lock(descriptor) and is_published(checkpoint, descriptor)
    finally:
        os.close(descriptor)


def is_leased(checkpoint: Path) -> bool:
    """Whether somebody holds it now."""
    try:
        descriptor = os.open(checkpoint / MANIFEST, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)


def is_published(checkpoint: Path, descriptor: int) -> bool:
    """Whether an open manifest is still the one under the checkpoint's name."""
    try:
        return os.path.samestat(os.stat(checkpoint / MANIFEST), os.fstat(descriptor))
    except OSError:
        return False
