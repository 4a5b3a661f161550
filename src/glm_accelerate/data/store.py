"""Prepared samples on disk: written once under the name of their content, read as memory-mapped arrays.

tokens.bin   int32, all samples side by side; a learnt token t is kept as ~t, so targets cost nothing
offsets.bin  int64, where each sample starts, and the end    contents.bin uint64, what equal lines share
targets.bin  int32, learnt tokens of each sample             places.bin   int32, the line each came from
"""

import bisect
import hashlib
import json
import mmap
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from glm_accelerate.data.types import FilePlace, Sample
from glm_accelerate.runtime.files import open_private, sync

FORMAT_VERSION = 5  # of the files: raise it when they change; those of another version are prepared again
REMARKS_KEPT = 5  # of each kind

Int32s = NDArray[np.int32]
Uint64s = NDArray[np.uint64]

_TOTALS = ("samples", "tokens", "targets", "truncated", "bad")
_KINDS = {
    "tokens": np.int32,
    "offsets": np.int64,
    "targets": np.int32,
    "places": np.int32,
    "contents": np.uint64,
}


class BrokenStore(ValueError):
    """A directory that does not hold what its report says. It is built again."""


class SourceSpan(NamedTuple):
    """The samples start..stop-1 come from one source and are drawn `weight` times an epoch."""

    start: int
    stop: int
    weight: float


@dataclass(frozen=True, slots=True)
class Remark:
    """One line that did not go in as it was written, and why."""

    place: FilePlace
    reason: str  # "kind", or "kind: more"


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What went in and what did not. `remarks` name the first few lines of each kind."""

    samples: int
    tokens: int
    targets: int
    truncated: int
    longest: int  # tokens of the longest sample that was shortened or left out, or 0
    dropped: Mapping[str, int]  # reason -> samples
    bad: int  # unreadable lines passed over
    bytes: int  # size of the source files
    remarks: tuple[Remark, ...]


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """Encoded samples side by side, as they are written to the files."""

    tokens: Int32s  # learnt ones complemented
    lengths: Int32s
    targets: Int32s
    lines: Int32s
    contents: Uint64s
    truncated: int
    longest: int
    dropped: Mapping[str, int]
    bad: int
    remarks: tuple[Remark, ...]


@dataclass(frozen=True)
class SourcePart:
    """The prepared samples of one source file, or some of them."""

    key: str
    path: Path  # of the source now; the directory knows only its content
    weight: float
    report: StoreReport
    tokens: Int32s  # of the whole file
    starts: NDArray[np.int64]  # of each sample in `tokens`
    stops: NDArray[np.int64]
    targets: Int32s
    places: Int32s
    contents: Uint64s
    damage: str = ""  # of the earlier files, because of which these were prepared again

    def picked(self, chosen: NDArray[np.bool_], key: str) -> "SourcePart":
        """The chosen samples, under another key. What was left out of the file stays in the report."""
        arrays = {
            name: getattr(self, name)[chosen] for name in ("starts", "stops", "targets", "places", "contents")
        }
        tokens, targets = int((arrays["stops"] - arrays["starts"]).sum()), int(arrays["targets"].sum())
        report = replace(self.report, samples=int(chosen.sum()), tokens=tokens, targets=targets)
        return replace(self, key=key, report=report, **arrays)


@dataclass(frozen=True)
class Store:
    """Samples of several sources, numbered through. Nothing is read before it is asked for."""

    parts: tuple[SourcePart, ...]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, number: int) -> Sample:
        part, local = self._locate(number)
        raw = part.tokens[part.starts[local] : part.stops[local]]
        return Sample(_plain(raw), raw < 0, FilePlace(str(part.path), int(part.places[local])))

    @cached_property
    def lengths(self) -> Int32s:
        """Tokens in each sample."""
        return np.concatenate([(part.stops - part.starts).astype(np.int32) for part in self.parts])

    @cached_property
    def targets(self) -> Int32s:
        """Learnt tokens in each sample."""
        return np.concatenate([part.targets for part in self.parts])

    @cached_property
    def spans(self) -> tuple[SourceSpan, ...]:
        """Which sample numbers belong to which source."""
        ends = zip(self._starts, self._starts[1:], self.parts, strict=False)
        return tuple(SourceSpan(start, stop, part.weight) for start, stop, part in ends)

    @cached_property
    def report(self) -> StoreReport:
        reports = [part.report for part in self.parts]
        return StoreReport(
            **{name: sum(getattr(report, name) for report in reports) for name in (*_TOTALS, "bytes")},
            longest=max(report.longest for report in reports),
            dropped=dict(sum((Counter(report.dropped) for report in reports), Counter[str]())),
            remarks=tuple(remark for report in reports for remark in report.remarks),
        )

    @property
    def damages(self) -> list[str]:
        """Damage that was found and repaired by preparing again, for a warning."""
        return [part.damage for part in self.parts if part.damage]

    @property
    def fingerprint(self) -> str:
        """Identifies which samples have which numbers, whatever directory they came from."""
        return hashlib.sha256("\n".join(part.key for part in self.parts).encode()).hexdigest()

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        for part in self.parts:
            starts.append(starts[-1] + part.report.samples)
        return starts

    def _locate(self, number: int) -> tuple[SourcePart, int]:
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        which = bisect.bisect_right(self._starts, number) - 1
        return self.parts[which], number - self._starts[which]


def _to_disk(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _plain(raw: Int32s) -> Int32s:
    return raw ^ (raw >> 31)  # ~t where negative


def open_part(directory: Path, path: Path, weight: float, *, check: bool = True) -> SourcePart:
    """Maps the files in `directory`, prepared from the file at `path`; BrokenStore if they are damaged.
    `check` reads all of them: a bit that flipped on a disk would be trained on.
    """
    report, digests = _read_report(directory, path)
    counts = {
        "tokens": report.tokens,
        "offsets": report.samples + 1,
        "targets": report.samples,
        "places": report.samples,
        "contents": report.samples,
    }
    arrays = {name: _map(directory / f"{name}.bin", counts[name], kind) for name, kind in _KINDS.items()}
    for name in _KINDS if check else ():
        if _digest(directory / f"{name}.bin") != digests.get(name):
            raise BrokenStore(f"{directory}: {name}.bin is not what was written")
    tokens, offsets, targets, places, contents = (arrays[name] for name in _KINDS)
    starts, stops = offsets[:-1], offsets[1:]
    return SourcePart(directory.name, path, weight, report, tokens, starts, stops, targets, places, contents)


def _read_report(directory: Path, path: Path) -> tuple[StoreReport, dict[str, str]]:
    """The report, and the SHA-256 of each file."""
    try:
        report: dict[str, Any] = json.loads((directory / "report.json").read_bytes())
        if report.pop("version") != FORMAT_VERSION:
            raise BrokenStore(f"{directory}: another format version")
        digests = dict(report.pop("digests"))
        remarks = tuple(Remark(FilePlace(str(path), line), reason) for line, reason in report.pop("remarks"))
        return StoreReport(**report, remarks=remarks), digests
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise BrokenStore(f"{directory}: report.json: {error}") from error


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:  # a bad sector
        raise BrokenStore(f"{path}: {error.strerror}") from error


def _map(path: Path, count: int, kind: type[np.generic]) -> NDArray[Any]:
    size = count * np.dtype(kind).itemsize
    try:
        with path.open("rb") as file:
            actual = os.fstat(file.fileno()).st_size
            if actual != size:
                raise BrokenStore(f"{path}: {actual} bytes, not {size}")
            if size == 0:  # nothing can be mapped
                return np.zeros(0, kind)
            # A plain array over a mapping: slicing np.memmap costs several times as much.
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), kind)
    except OSError as error:
        raise BrokenStore(f"{path}: {error.strerror}") from error


class Writer:
    """Fills a directory that nobody reads until `publish` gives it its name."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files = {name: open_private(directory / f"{name}.bin", "wb") for name in _KINDS}
        self._digests = {name: hashlib.sha256() for name in _KINDS}
        self._write("offsets", bytes(8))
        self._longest = 0
        self._totals, self._dropped = Counter[str](), Counter[str]()
        self._remarks: dict[str, list[Remark]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for file in self._files.values():
            # After a full disk, closing fails once more; the first failure is the one to report.
            with suppress(OSError):
                file.close()

    @property
    def bytes_written(self) -> int:
        return 4 * self._totals["tokens"] + 24 * self._totals["samples"]

    def append(self, block: EncodedBlock) -> None:
        ends = self._totals["tokens"] + np.cumsum(block.lengths, dtype=np.int64)
        self._write("tokens", block.tokens.data)
        self._write("offsets", ends.data)
        self._write("targets", block.targets.data)
        self._write("places", block.lines.data)
        self._write("contents", block.contents.data)
        learnt = int(block.targets.sum())
        totals = (len(block.lengths), len(block.tokens), learnt, block.truncated, block.bad)
        self._totals.update(dict(zip(_TOTALS, totals, strict=True)))
        self._longest = max(self._longest, block.longest)
        self._dropped.update(block.dropped)
        for remark in block.remarks:
            kept = self._remarks.setdefault(remark.reason.partition(":")[0], [])
            if len(kept) < REMARKS_KEPT:
                kept.append(remark)

    def _write(self, name: str, content: bytes | memoryview) -> None:
        self._files[name].write(content)
        self._digests[name].update(content)

    def publish(self, destination: Path, source_bytes: int) -> None:
        """Everything on disk first, then one rename. If another process was first, its result counts."""
        for file in self._files.values():
            _to_disk(file)
            file.close()
        report = {
            "version": FORMAT_VERSION,
            "digests": {name: digest.hexdigest() for name, digest in self._digests.items()},
            **{name: self._totals[name] for name in _TOTALS},
            "longest": self._longest,
            "dropped": dict(self._dropped),
            "bytes": source_bytes,
            "remarks": [
                [remark.place.line, remark.reason] for kept in self._remarks.values() for remark in kept
            ],
        }
        with open_private(self._directory / "report.json", "wb") as file:
            file.write(json.dumps(report, ensure_ascii=False, indent=1).encode())
            _to_disk(file)
        sync(self._directory)
        try:
            self._directory.rename(destination)
        except OSError:
            if not (destination / "report.json").exists():
                raise
        sync(destination.parent)
