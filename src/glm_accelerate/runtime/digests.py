"""SHA-256 of large files that seldom change, remembered by path, size and time of change."""

import hashlib
import os
import re
import time
from contextlib import suppress
from pathlib import Path

from glm_accelerate.runtime import env

DIGEST = re.compile(rb"[0-9a-f]{64}")
FRESH_NS = 2_000_000_000  # a file this young may change once more within one tick of its clock


def file_digest(path: Path) -> str:
    """Of the whole content. What is remembered is never believed after the file was touched."""
    path = path.resolve()
    before = path.stat()
    entry = _entry(path, before)
    with suppress(OSError):  # not remembered yet
        known = DIGEST.fullmatch(entry.read_bytes())
        if known:
            return known[0].decode()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    unchanged = _entry(path, path.stat()) == entry
    if unchanged and time.time_ns() - before.st_mtime_ns > FRESH_NS:
        with suppress(OSError):  # a cache that cannot be written costs time only
            _remember(entry, digest)
    return digest


def _entry(path: Path, stat: os.stat_result) -> Path:
    key = hashlib.sha256(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode(errors="surrogateescape"))
    return env.cache_root() / "digests" / key.hexdigest()


def _remember(entry: Path, digest: str) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = entry.with_name(f".{entry.name}.{os.getpid()}")
    temporary.write_text(digest, encoding="ascii")
    temporary.replace(entry)
