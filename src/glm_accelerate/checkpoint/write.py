"""One rank's share of a checkpoint, written and published: one plain function, whoever runs it.

Each group of tensors is a safetensors file, written and hashed in one pass. A piece is stored in blocks of
bounded size, each with its own digest, so that a reader verifies no more than it reads. With a codec a key
holds its compressed blocks, one after another, as plain bytes. No torch: the writer process has none.
"""

import hashlib
import json
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from glm_accelerate.checkpoint.format import (
    DTYPES,
    LATEST,
    STATE,
    File,
    Groups,
    Manifest,
    Rows,
    Shape,
    Span,
    Stored,
    parse_tensors,
    require_whole,
    seal,
)
from glm_accelerate.checkpoint.meeting import Meeting, SaveFailed
from glm_accelerate.runtime.env import cores
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.files import sync, write_synced, write_text

ALIGN = 64  # payloads begin on a cache line
MOST_THREADS = 4
BLOCK = 32 << 20  # bytes, before compression
SYNCED = 1 << 30  # bytes after which a file goes to disk: its growth then tells that the disk advances
WIDEST = 10**15  # stands for offsets that are not known yet: more digits than any will have
MARGIN = 1 << 20  # bytes for the manifest and the directory, besides what each tensor takes there
MARGIN_PER_PIECE = 512
EXPONENTS = {"F16": 0x7C00, "BF16": 0x7F80}  # all ones: infinite, or not a number
FLOATS = {"F32": np.float32, "F64": np.float64}


@dataclass(frozen=True, slots=True)
class PieceEntry:
    """A piece as its writer knows it: everything but the numbers."""

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
class SaveJob:
    """One save, as a rank's writer needs to know it besides the tensors."""

    meeting: Meeting
    run_id: str
    codec: str
    state: Mapping[str, Any]
    fingerprints: Mapping[str, str]
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Written:
    """One rank's share of a checkpoint."""

    files: dict[str, File]
    tensors: Groups
    finite: bool  # whether its weights and moments are


@dataclass(frozen=True, slots=True)
class _Block:
    """A box of a piece, and its bytes."""

    name: str
    dtype: str
    offset: Shape
    shape: Shape
    payload: memoryview


@dataclass(frozen=True, slots=True)
class _Ready:
    """A block as it goes to disk."""

    content: memoryview | bytes
    sha256: str
    finite: bool


Source = Callable[[PieceEntry], memoryview]  # the bytes of a piece
Encode = Callable[[memoryview, int], bytes]


def write(job: SaveJob, pieces: Sequence[PieceEntry], source: Source) -> int:
    """Write this rank's files and see the checkpoint published; the first rank publishes. Returns bytes:
    the first rank's are those of the whole checkpoint, the others' their own. Leaves nothing if it fails.
    """
    meeting = job.meeting
    directory = meeting.directory
    try:
        meeting.begin()
        _require_space(directory, pieces)
        written = write_files(directory, pieces, source, meeting.rank, meeting.ranks, job.codec)
        if meeting.rank:
            meeting.report(asdict(written))
            meeting.await_publication()
            return sum(file.bytes for file in written.files.values())
        manifest = _merge(job, written)
        for name, content in seal(manifest).items():
            write_synced(directory / name, content)
        sync(directory)
        directory.rename(meeting.target)  # from here on it is a checkpoint
        return point_to(meeting, manifest)
    except SaveFailed as error:
        meeting.give_up(str(error))
        raise
    except (OSError, UserError) as error:
        reason = f"cannot be written: {error}"
        meeting.give_up(reason)
        raise SaveFailed(reason) from error
    except BaseException as error:
        meeting.give_up(repr(error))
        raise


def point_to(meeting: Meeting, manifest: Manifest) -> int:
    """Let the pointer name what was published, if it is fit to go on from. Returns its bytes."""
    target = meeting.target
    sync(target.parent)
    if meeting.kind == "checkpoint" and not manifest.facts.get("nonfinite"):
        write_text(target.with_name(LATEST), target.name + "\n")
    return manifest.bytes


def _require_space(directory: Path, pieces: Sequence[PieceEntry]) -> None:
    """Refuse to begin what cannot end. (With a codec it needs less, but how much is not known.)"""
    need = MARGIN + sum(piece.bytes + MARGIN_PER_PIECE for piece in pieces)
    have = shutil.disk_usage(directory).free
    if have < need:
        raise SaveFailed(f"no room: needs {need:,} bytes, {have:,} are free")


def _merge(job: SaveJob, mine: Written) -> Manifest:
    """What all ranks wrote as one manifest."""
    state = json.dumps(job.state, indent=2, allow_nan=False).encode()
    write_synced(job.meeting.directory / STATE, state)
    files = {STATE: File(len(state), hashlib.sha256(state).hexdigest()), **mine.files}
    shares, finite = [mine.tensors], mine.finite
    for note in job.meeting.gather():
        files.update({name: File(**entry) for name, entry in note["files"].items()})
        shares.append(parse_tensors(note["tensors"]))
        finite = finite and note["finite"]
    groups: dict[str, dict[str, Stored]] = {}
    for group, name, stored in (
        (group, name, stored)
        for share in shares
        for group, entries in share.items()
        for name, stored in entries.items()
    ):
        entries = groups.setdefault(group, {})
        before = entries.get(name, Stored(stored.dtype, stored.shape, ()))
        if (before.dtype, before.shape) != (stored.dtype, stored.shape):
            raise SaveFailed(f"the ranks disagree on what {name} is")
        entries[name] = Stored(stored.dtype, stored.shape, (*before.pieces, *stored.pieces))
    for entries in groups.values():
        for name, stored in entries.items():
            require_whole(stored, name)
    return Manifest(
        step=job.meeting.step,
        attempt=job.meeting.attempt,
        files=files,
        fingerprints=job.fingerprints,
        facts={**job.facts, **({} if finite else {"nonfinite": True})},
        run=job.run_id,
        ranks=job.meeting.ranks,
        codec=job.codec,
        tensors=groups,
    )


def write_files(
    directory: Path, pieces: Sequence[PieceEntry], source: Source, rank: int, ranks: int, codec: str
) -> Written:
    """A file for each group of which this rank owns something."""
    files: dict[str, File] = {}
    tensors: dict[str, dict[str, Stored]] = {}
    finite = True
    for group in dict.fromkeys(piece.group for piece in pieces):
        mine = sorted(
            (piece for piece in pieces if piece.group == group), key=lambda piece: -DTYPES[piece.dtype][1]
        )  # wide items first: every tensor then begins on a multiple of its item's bytes
        path = directory / f"{group}-{rank}-of-{ranks}.safetensors"
        files[path.name], tensors[group], sound = _write_file(path, mine, source, codec)
        finite = finite and sound
    return Written(files, tensors, finite)


def blocks(piece: PieceEntry) -> Iterator[tuple[Shape, Shape, int]]:
    """A piece as boxes of at most BLOCK bytes or one row, in order: offset, shape, bytes."""
    for start, stop in piece.rows:
        size, offset = (stop - start, *piece.size[1:]), (start, *piece.offset[1:])
        share = piece.bytes // piece.size[0] * (stop - start)
        yield from blocks(replace(piece, rows=(), offset=offset, size=size, bytes=share))
    if piece.rows:
        return
    axis = next((axis for axis, count in enumerate(piece.size) if count > 1), None)
    if axis is None or not piece.bytes:
        yield piece.offset, piece.size, piece.bytes
        return
    row = piece.bytes // piece.size[axis]
    for first in range(0, piece.size[axis], rows := max(1, BLOCK // row)):
        count = min(rows, piece.size[axis] - first)
        offset, size = list(piece.offset), list(piece.size)
        offset[axis] += first
        size[axis] = count
        yield tuple(offset), tuple(size), count * row


def _write_file(
    path: Path, pieces: Sequence[PieceEntry], source: Source, codec: str
) -> tuple[File, dict[str, Stored], bool]:
    encode: Encode | None = None
    if codec != "none":
        from glm_accelerate.checkpoint.codec import encode
    lengths = {piece.name: WIDEST if encode else piece.bytes for piece in pieces}
    header = _header(pieces, lengths, codec)
    end = len(header)
    whole = hashlib.sha256(header)
    spans: dict[str, list[Span]] = {piece.name: [] for piece in pieces}
    finite = True
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(header)
        for block, ready in _prepared(_blocks_of(pieces, source), encode):
            if encode is None:
                whole.update(ready.content)
            file.write(ready.content)
            begin, end = end, end + len(ready.content)
            if end // SYNCED > begin // SYNCED:
                file.flush()
                os.fsync(file.fileno())
            spans[block.name].append(Span(path.name, begin, end, block.offset, block.shape, ready.sha256))
            finite = finite and ready.finite
        if encode is not None:
            lengths = {name: stored[-1].end - stored[0].begin for name, stored in spans.items()}
            file.seek(0)
            file.write(_header(pieces, lengths, codec, room=len(header)))
        file.flush()
        os.fsync(file.fileno())
    tensors = {piece.name: Stored(piece.dtype, piece.shape, tuple(spans[piece.name])) for piece in pieces}
    # A header that says how long the compressed tensors became is known last, and hashed first.
    return File(end, _digest_again(path) if encode else whole.hexdigest()), tensors, finite


def _digest_again(path: Path) -> str:
    """The digest of what was just written. Whoever waits for the save sees that the file is touched."""
    whole = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            whole.update(block)
            os.utime(path)
    return whole.hexdigest()


def _blocks_of(pieces: Sequence[PieceEntry], source: Source) -> Iterator[_Block]:
    for piece in pieces:
        payload, begin = source(piece), 0
        for offset, shape, length in blocks(piece):
            yield _Block(piece.name, piece.dtype, offset, shape, payload[begin : begin + length])
            begin += length


def _prepared(raw: Iterator[_Block], encode: Encode | None) -> Iterator[tuple[_Block, _Ready]]:
    """Each block compressed, hashed and checked in threads, a few ahead of the one that is written."""

    def prepare(block: _Block) -> _Ready:
        content = encode(block.payload, DTYPES[block.dtype][1]) if encode else block.payload
        finite = all_finite(block.payload, block.dtype)
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


def _header(pieces: Sequence[PieceEntry], lengths: dict[str, int], codec: str, room: int = 0) -> bytes:
    """The head of a safetensors file, padded to `room` bytes or to the next cache line."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"} if codec == "none" else {"codec": codec}}
    begin = 0
    for piece in pieces:
        end = begin + lengths[piece.name]
        dtype, shape = (piece.dtype, piece.size) if codec == "none" else ("U8", (end - begin,))
        entries[piece.name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    room = room or math.ceil((8 + len(text)) / ALIGN) * ALIGN
    return (room - 8).to_bytes(8, "little") + text.ljust(room - 8)


def all_finite(payload: memoryview | bytes, dtype: str) -> bool:
    """Whether numbers are finite, from their bytes. True for a kind that always is, too."""
    if not len(payload):
        return True
    if dtype in FLOATS:
        numbers = np.frombuffer(payload, FLOATS[dtype])
        with np.errstate(invalid="ignore"):
            return math.isfinite(numbers.min()) and math.isfinite(numbers.max())
    if dtype in EXPONENTS:
        mask = np.uint16(EXPONENTS[dtype])
        return bool((np.frombuffer(payload, np.uint16) & mask).max() != mask)
    return True
