"""Results of reading a large file, above all its SHA-256, remembered until the file is changed.

Size, times and inode show a change: the time of the last change of any kind (ctime) cannot be set back.
"""

import hashlib
import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from glm_accelerate.runtime.files import private_folder, write_text

FRESH_NS = 2_000_000_000  # a file this young may change once more within one tick of its clock


@dataclass(frozen=True, slots=True)
class Identity:
    """What a file system knows about a file without reading it."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


def file_digest(path: Path) -> str:
    """The SHA-256 of a file, from the cache if it has not changed."""
    before = identity_of(path.stat())
    known = recall("digest", path, before)
    if isinstance(known, str):
        return known
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if identity_of(path.stat()) == before:
        remember("digest", path, before, digest)
    return digest


def identity_of(status: os.stat_result) -> Identity:
    return Identity(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def recall(kind: str, path: Path, identity: Identity) -> Any:
    """What was remembered about this very file, or None."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        entry = json.loads(_entry(kind, path).read_bytes())
        return entry["found"] if entry["identity"] == asdict(identity) else None
    return None


def remember(kind: str, path: Path, identity: Identity, content: object) -> None:
    """Keep one entry a file and kind. A cache that cannot be written only costs time."""
    if time.time_ns() - identity.ctime_ns <= FRESH_NS:
        return
    with suppress(OSError):
        entry = json.dumps({"identity": asdict(identity), "found": content})
        write_text(_entry(kind, path), entry, synced=False)


def _entry(kind: str, path: Path) -> Path:
    key = hashlib.sha256(os.fsencode(path.resolve()) + b"\0" + kind.encode())
    return private_folder("digests") / f"{key.hexdigest()[:32]}.json"
