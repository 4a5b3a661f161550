"""One pass over a source file: the digest of its content, and where it can be cut between lines.

The cuts carry line numbers, so that a range read by itself still names its lines rightly. A result is
remembered by path, size, time and inode: 10 GB are not read again at every start.
"""

import hashlib
import json
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm_accelerate.runtime.errors import UserError

RANGE_BYTES = 1 << 20  # one worker's portion: about a second of work, and small in memory
_SETTLED_NS = 2_000_000_000  # a file changed more recently than this may change again within one clock tick


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes start..stop-1 of a file: whole lines, the first of which has number `line` (from 1)."""

    start: int
    stop: int
    line: int


@dataclass(frozen=True, slots=True)
class Identity:
    """What a file system says of a file without reading it."""

    size: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True, slots=True)
class Scan:
    """What a file holds, and how it is divided among workers."""

    identity: Identity
    digest: str
    ranges: tuple[Range, ...]


def identify(path: Path) -> Identity:
    """UserError if there is no such file."""
    try:
        found = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    if path.is_dir():
        raise UserError("is a directory", where=path, cure="name the JSONL file in it")
    if not stat.S_ISREG(found.st_mode):
        cure = "write it to a file first: it is read more than once"
        raise UserError("is not a regular file", where=path, cure=cure)
    if found.st_size == 0:
        raise UserError("the data file is empty", where=path, cure="one JSON object a line is expected")
    return Identity(found.st_size, found.st_mtime_ns, found.st_ino)


def scan(path: Path, cache: Path, read: Callable[[int], None], range_bytes: int = RANGE_BYTES) -> Scan:
    """Reads the file once, or remembers having done so. `read` is told how many bytes more are done."""
    identity = identify(path)
    memo = cache / "scans" / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.json"
    known = _recall(memo, identity, range_bytes)
    if known is not None:
        read(identity.size)
        return known
    found = _scan(path, identity, read, range_bytes)
    if identify(path) != identity:
        raise UserError(
            "the data file changed while it was read", where=path, cure="start again when it is complete"
        )
    if time.time_ns() - identity.mtime_ns > _SETTLED_NS:
        with suppress(OSError):  # a cache that may only be read may hold all that is wanted
            _remember(memo, found, range_bytes)
    return found


def _scan(path: Path, identity: Identity, read: Callable[[int], None], range_bytes: int) -> Scan:
    digest = hashlib.sha256()
    ranges: list[Range] = []
    start = position = 0
    line = next_line = 1
    try:
        file = path.open("rb", buffering=0)
    except OSError as error:  # the cache is not to blame
        raise _unreadable(path, error) from error
    with file:
        while portion := file.read(range_bytes):
            digest.update(portion)
            newline = portion.rfind(b"\n")
            if newline >= 0:
                next_line += portion.count(b"\n")
                stop = position + newline + 1
                ranges.append(Range(start, stop, line))
                start, line = stop, next_line
            position += len(portion)
            read(len(portion))
    if start < position:  # the last line has no newline
        ranges.append(Range(start, position, line))
    return Scan(identity, digest.hexdigest(), tuple(ranges))


def _unreadable(path: Path, error: OSError) -> UserError:
    what = f"cannot read the data file: {error.strerror}"
    return UserError(what, where=path, cure="check data.train and data.dev")


def _recall(memo: Path, identity: Identity, range_bytes: int) -> Scan | None:
    """None if nothing usable is remembered: then the file is simply read."""
    try:
        said: dict[str, Any] = json.loads(memo.read_bytes())
        if (
            said["identity"] != [identity.size, identity.mtime_ns, identity.inode]
            or said["range_bytes"] != range_bytes
        ):
            return None
        ranges = tuple(Range(start, stop, line) for start, stop, line in said["ranges"])
        return Scan(identity, said["digest"], ranges)
    except (OSError, KeyError, TypeError, ValueError):
        return None


def _remember(memo: Path, found: Scan, range_bytes: int) -> None:
    identity = found.identity
    said = {
        "identity": [identity.size, identity.mtime_ns, identity.inode],
        "range_bytes": range_bytes,
        "digest": found.digest,
        "ranges": [[part.start, part.stop, part.line] for part in found.ranges],
    }
    memo.parent.mkdir(parents=True, exist_ok=True)
    temporary = memo.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(said), encoding="utf-8")
    temporary.replace(memo)
