"""The files of one rank: its pieces as safetensors, written and hashed in one pass over the bytes.

A piece is stored in blocks of bounded size, each with its own digest, so that a reader of a part verifies no
more than it reads. With a codec a key holds its compressed blocks, one after another, as plain bytes.
"""

import hashlib
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from glm_accelerate.checkpoint.finite import all_finite
from glm_accelerate.checkpoint.format import (
    DTYPES,
    File,
    Groups,
    Rows,
    Shape,
    Span,
    Stored,
    file_of,
)
from glm_accelerate.runtime.env import cores

ALIGN = 64  # payloads begin on a cache line
MOST_THREADS = 4
BLOCK = 32 << 20  # bytes, before compression
SYNCED = 1 << 30  # bytes after which a file goes to disk: its growth then tells that the disk advances
WIDEST = 10**15  # stands for offsets that are not known yet: more digits than any will have


@dataclass(frozen=True, slots=True)
class PieceEntry:
    """A piece as its writer knows it: everything but the items."""

    group: str
    name: str
    dtype: str
    shape: Shape  # of the whole tensor
    offset: Shape
    size: Shape  # of the piece
    begin: int  # where its bytes are in the copy
    bytes: int
    rows: Rows = ()  # of the whole tensor, if the piece is several boxes of it


@dataclass(frozen=True, slots=True)
class Written:
    """One rank's share of a checkpoint."""

    files: dict[str, File]
    tensors: Groups
    finite: bool  # whether its weights and moments are


@dataclass(frozen=True, slots=True)
class _Block:
    """A box of a piece, and its bytes."""

    part: PieceEntry
    offset: Shape
    shape: Shape
    payload: memoryview


@dataclass(frozen=True, slots=True)
class _Ready:
    """A block as it goes to disk."""

    content: memoryview | bytes
    sha256: str
    finite: bool


Source = Callable[[PieceEntry], memoryview]  # the items of a part, as bytes
Encode = Callable[[memoryview, int], bytes]


def write_files(
    directory: Path, parts: Sequence[PieceEntry], source: Source, *, rank: int, ranks: int, codec: str
) -> Written:
    """A file for each group of which this rank owns something."""
    files: dict[str, File] = {}
    tensors: dict[str, dict[str, Stored]] = {}
    finite = True
    for group in dict.fromkeys(part.group for part in parts):
        mine = sorted(
            (part for part in parts if part.group == group), key=lambda part: -DTYPES[part.dtype][1]
        )  # wide items first: every tensor then begins on a multiple of its item's bytes
        path = directory / file_of(group, rank, ranks)
        files[path.name], tensors[group], sound = _write_file(path, mine, source, codec)
        finite = finite and sound
    return Written(files, tensors, finite)


def blocks(part: PieceEntry) -> Iterator[tuple[Shape, Shape, int]]:
    """A piece as boxes of at most BLOCK bytes or one row, in order: offset, shape, bytes."""
    for start, stop in part.rows:
        size, offset = (stop - start, *part.size[1:]), (start, *part.offset[1:])
        share = part.bytes // part.size[0] * (stop - start)
        yield from blocks(replace(part, rows=(), offset=offset, size=size, bytes=share))
    if part.rows:
        return
    axis = next((axis for axis, count in enumerate(part.size) if count > 1), None)
    if axis is None or not part.bytes:
        yield part.offset, part.size, part.bytes
        return
    row = part.bytes // part.size[axis]
    for first in range(0, part.size[axis], rows := max(1, BLOCK // row)):
        count = min(rows, part.size[axis] - first)
        offset, size = list(part.offset), list(part.size)
        offset[axis] += first
        size[axis] = count
        yield tuple(offset), tuple(size), count * row


def encoder(codec: str) -> Encode | None:
    """How blocks are compressed; None leaves them as they are."""
    if codec == "none":
        return None
    from glm_accelerate.checkpoint.codec import CODECS

    return CODECS[codec].encode


def _write_file(
    path: Path, parts: Sequence[PieceEntry], source: Source, codec: str
) -> tuple[File, dict[str, Stored], bool]:
    plain = codec == "none"
    lengths = {part.name: part.bytes if plain else WIDEST for part in parts}
    header = _header(parts, lengths, codec)
    place = len(header)
    whole = hashlib.sha256(header)
    spans: dict[str, list[Span]] = {part.name: [] for part in parts}
    finite = True
    with os.fdopen(_create(path), "wb") as file:
        file.write(header)
        for block, ready in _prepared(_blocks_of(parts, source), encoder(codec)):
            if plain:
                whole.update(ready.content)
            file.write(ready.content)
            if (place + len(ready.content)) // SYNCED > place // SYNCED:
                file.flush()
                os.fsync(file.fileno())
            end = place + len(ready.content)
            spans[block.part.name].append(
                Span(path.name, place, end, block.offset, block.shape, ready.sha256)
            )
            finite, place = finite and ready.finite, end
        if not plain:
            lengths = {name: pieces[-1].end - pieces[0].begin for name, pieces in spans.items()}
            file.seek(0)
            file.write(_header(parts, lengths, codec, room=len(header)))
        file.flush()
        os.fsync(file.fileno())
    stored = {part.name: Stored(part.dtype, part.shape, tuple(spans[part.name])) for part in parts}
    # A header that says how long the compressed tensors became is known last, and hashed first.
    return File(place, whole.hexdigest() if plain else _digest_again(path)), stored, finite


def _digest_again(path: Path) -> str:
    """Of what was just written. Whoever waits for the save sees the file touched, and that it goes on."""
    whole = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            whole.update(block)
            os.utime(path)
    return whole.hexdigest()


def _blocks_of(parts: Sequence[PieceEntry], source: Source) -> Iterator[_Block]:
    for part in parts:
        payload, taken = source(part), 0
        for offset, shape, length in blocks(part):
            yield _Block(part, offset, shape, payload[taken : taken + length])
            taken += length


def _prepared(raw: Iterator[_Block], encode: Encode | None) -> Iterator[tuple[_Block, _Ready]]:
    """Each block compressed, hashed and looked at in threads, a few ahead of the one that is written."""

    def prepare(block: _Block) -> _Ready:
        part = block.part
        content = encode(block.payload, DTYPES[part.dtype][1]) if encode else block.payload
        finite = all_finite(block.payload, part.dtype)
        return _Ready(content, hashlib.sha256(content).hexdigest(), finite)

    threads = min(MOST_THREADS, cores())
    with ThreadPoolExecutor(threads) as pool:
        ahead: deque[tuple[_Block, Future[_Ready]]] = deque()
        for block in raw:
            ahead.append((block, pool.submit(prepare, block)))
            if len(ahead) > threads:
                first, ready = ahead.popleft()
                yield first, ready.result()
        for first, ready in ahead:
            yield first, ready.result()


def _header(parts: Sequence[PieceEntry], lengths: dict[str, int], codec: str, room: int = 0) -> bytes:
    """The head of a safetensors file, padded to `room` bytes or to the next cache line."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"} if codec == "none" else {"codec": codec}}
    place = 0
    for part in parts:
        length = lengths[part.name]
        dtype, shape = (part.dtype, part.size) if codec == "none" else ("U8", (length,))
        entries[part.name] = {"dtype": dtype, "shape": shape, "data_offsets": (place, place + length)}
        place += length
    text = json.dumps(entries, separators=(",", ":")).encode()
    room = room or math.ceil((8 + len(text)) / ALIGN) * ALIGN
    return (room - 8).to_bytes(8, "little") + text.ljust(room - 8)


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
