"""Atomic publication: write beside the target, sync, rename, sync the parent. Readers see all or nothing."""

import os
import shutil
import tempfile
from pathlib import Path

LATEST = "latest"


def write_synced(path: Path, content: bytes) -> None:
    """A new file that is on disk when this returns."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replace a small file in one piece."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # a full disk names no file
            error.filename = str(path)
        raise


def sync(path: Path) -> None:
    """Make a file or a directory's entries durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep(directory: Path) -> None:
    """Remove what interrupted saves left. For the first rank, at the start, with the run's lock."""
    kinds = (".checkpoint-*", "..checkpoint-*", ".snapshot-*", "..snapshot-*")
    for pattern in (*kinds, f".{LATEST}.*"):
        for leftover in directory.glob(pattern):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)
