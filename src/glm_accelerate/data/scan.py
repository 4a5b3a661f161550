"""One pass over a source file: the digest of its content, and where it can be cut between lines.

The cuts carry line numbers, so that a range read by itself still names its lines rightly. The result is
remembered: 10 GB are not read again at every start.
"""

import hashlib
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from glm_accelerate.runtime.digests import Identity, identity_of, recall, remember
from glm_accelerate.runtime.errors import UserError

Read = Callable[[int], None]  # is told the bytes just done
RANGE_BYTES = 1 << 20  # one worker's range: about a second of work, and small in memory


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes start..stop-1 of a file: whole lines, the first of which has number `line` (from 1)."""

    start: int
    stop: int
    line: int


@dataclass(frozen=True, slots=True)
class Scan:
    """What a file holds, and how it is divided among workers."""

    identity: Identity
    digest: str
    ranges: tuple[Range, ...]


def identify(path: Path) -> Identity:
    """UserError if there is no such file."""
    try:
        status = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    if path.is_dir():
        raise UserError("is a directory", where=path, cure="name the files in it: '*.jsonl'")
    if not stat.S_ISREG(status.st_mode):
        cure = "write it to a file first: it is read more than once"
        raise UserError("is not a regular file", where=path, cure=cure)
    if status.st_size == 0:
        raise _empty(path)
    return identity_of(status)


def scan(
    path: Path,
    read: Read,
    range_bytes: int = RANGE_BYTES,
    lines: Callable[[Read], Path] | None = None,
    first: int | None = None,
) -> Scan:
    """Reads the file once, or recalls the earlier result. Calls `read` with the number of bytes just done.
    `lines` makes the file of lines that stands for one of another form, or for its `first` rows: all this is
    then true of that file.
    """
    identity = identify(path)
    kind = f"lines {range_bytes}" + (f", the first {first}" if first else "")
    remembered = recall(kind, path, identity)
    with suppress(KeyError, TypeError, ValueError):  # nothing usable is remembered: the file is read
        ranges = tuple(Range(start, stop, line) for start, stop, line in remembered["ranges"])
        result = Scan(identity, remembered["digest"], ranges)
        read(identity.size)
        return result
    stand_in = lines(read) if lines else path
    result = _scan(stand_in, identity, read if stand_in == path else _ignore, range_bytes)
    if identify(path) != identity:
        raise UserError(
            "the data file changed while it was read", where=path, cure="start again when it is complete"
        )
    if not result.ranges:
        raise _empty(path)
    ranges = [[part.start, part.stop, part.line] for part in result.ranges]
    remember(kind, path, identity, {"digest": result.digest, "ranges": ranges})
    return result


def _ignore(_: int) -> None:
    """Of bytes that were counted as they were written."""


def _scan(path: Path, identity: Identity, read: Read, range_bytes: int) -> Scan:
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


def _empty(path: Path) -> UserError:
    return UserError("the data file is empty", where=path, cure="one JSON object a line is expected")


def _unreadable(path: Path, error: OSError) -> UserError:
    what = f"cannot read the data file: {error.strerror}"
    return UserError(what, where=path, cure="check data.train and data.dev")
