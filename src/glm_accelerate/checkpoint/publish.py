"""Atomic publication: write beside the target, sync, rename, sync the parent. Readers see all or nothing."""

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def publishing(target: Path) -> Generator[Path, None, None]:
    """A temporary directory inside the target's parent that becomes `target` when the block ends well."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    assert not target.exists(), f"{target} is published and is never written again"
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield temporary
        for path in sorted(temporary.iterdir()):
            path.chmod(0o600)
            sync(path)
        sync(temporary)
        temporary.rename(target)
        sync(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


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
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Make a file or a directory's entries durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep(directory: Path) -> None:
    """Remove what interrupted saves left. Only the holder of the run's lock may call this."""
    for leftover in directory.glob(".checkpoint-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for leftover in directory.glob(".latest.*"):
        leftover.unlink(missing_ok=True)
