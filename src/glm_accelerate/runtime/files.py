"""Files that appear whole or not at all: written beside their place, synced, renamed."""

import os
import tempfile
from pathlib import Path


def write_synced(path: Path, content: bytes) -> None:
    """A new file that is on disk when this returns."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def write_text(path: Path, text: str, *, synced: bool = True) -> None:
    """Replace a small file in one piece. `synced`: it has to survive a power loss."""
    temporary = write_beside(path, text, synced=synced)
    try:
        temporary.replace(path)
        if synced:
            sync(path.parent)
    except BaseException as error:
        _give_up(temporary, path, error)
        raise


def write_beside(path: Path, text: str, *, synced: bool = True) -> Path:
    """A temporary file in the folder of `path`, for it to become that file."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if synced:
                os.fsync(descriptor)
    except BaseException as error:
        _give_up(temporary, path, error)
        raise
    return temporary


def sync(path: Path) -> None:
    """Make a file or a directory's entries durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _give_up(temporary: Path, path: Path, error: BaseException) -> None:
    temporary.unlink(missing_ok=True)
    if isinstance(error, OSError) and error.filename is None:  # a full disk names no file
        error.filename = str(path)
