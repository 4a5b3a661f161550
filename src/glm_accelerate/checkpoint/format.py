"""What a checkpoint is on disk: safetensors and JSON, a manifest with the size and SHA-256 of each file and
of each piece of each tensor, and the manifest's own digest beside it. A directory is a checkpoint if, and
only if, its manifest says so. Schema 1 (two files, whole tensors) reads as the same manifest.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from glm_accelerate.runtime.errors import UserError

SCHEMA = 2
FOLDER = "checkpoints"  # in a run's directory
Kind = Literal["checkpoint", "snapshot"]  # a snapshot has weights only, and nothing goes on from it
MANIFEST, DIGEST, STATE = "manifest.json", "manifest.sha256", "state.json"
LATEST = "latest"  # beside the checkpoints: the name of the newest one
WEIGHTS, OPTIMIZER = "weights", "optimizer"  # the groups
NAME = re.compile(r"(checkpoint|snapshot)-(0|[1-9][0-9]{0,17})", re.ASCII)
HEADER_LIMIT = 100_000_000  # bytes of a safetensors header, as its own reader has it

# Names of safetensors, what torch calls the same, and the bytes of one item.
DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "C64": ("complex64", 8),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}

Shape = tuple[int, ...]
Rows = tuple[tuple[int, int], ...]  # intervals along the first dimension


class Damaged(UserError):
    """A checkpoint is not what was written. An older one may do."""


@dataclass(frozen=True, slots=True)
class File:
    """One file of a checkpoint."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Span:
    """Where a box of a tensor lies: bytes [begin, end) of a file."""

    file: str
    begin: int
    end: int
    offset: Shape
    shape: Shape
    sha256: str  # of these bytes; empty in schema 1


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a checkpoint."""

    dtype: str
    shape: Shape
    pieces: tuple[Span, ...]


Groups = Mapping[str, Mapping[str, Stored]]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds and what it was made with."""

    step: int
    attempt: int
    files: Mapping[str, File]
    fingerprints: Mapping[str, str]  # of model, data, tokenizer, template, optimizer, environment
    facts: Mapping[str, Any] = field(default_factory=dict)  # for people and tools: held-out loss, method
    run: str = ""  # id of the run directory that owns it; empty in schema 1
    ranks: int = 1
    codec: str = "none"
    tensors: Groups = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def bytes(self) -> int:
        """What all of it takes on disk."""
        return sum(file.bytes for file in self.files.values())


def step_of(name: str, kind: Kind = "checkpoint") -> int | None:
    """The step that a directory's name stands for, if it is a checkpoint's name at all."""
    match = NAME.fullmatch(name)
    return int(match[2]) if match and match[1] == kind else None


def folder_of(run: Path, kind: Kind) -> Path:
    """Where all of a kind are published."""
    return run / f"{kind}s"


def path_of(run: Path, kind: Kind, step: int) -> Path:
    """Where one is published."""
    return folder_of(run, kind) / f"{kind}-{step}"


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal(manifest: Manifest) -> dict[str, bytes]:
    """The last two files of a checkpoint: the manifest, with a line for each of its keys, and its digest."""
    text = ",\n".join(
        f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}"
        for key, value in sorted(asdict(manifest).items())
    )
    content = f"{{\n{text}\n}}\n".encode()
    return {MANIFEST: content, DIGEST: _seal_of(content)}


def read_manifest(directory: Path) -> Manifest:
    """The manifest, if it is whole and in its place. Raises a UserError that says what is wrong otherwise."""
    try:
        content = (directory / MANIFEST).read_bytes()
        sealed = (directory / DIGEST).read_bytes()
    except OSError as error:
        raise Damaged(f"not a whole checkpoint: {error}", where=directory) from error
    if sealed != _seal_of(content):
        raise Damaged("the manifest does not match its digest", where=directory / MANIFEST)
    fields: dict[str, Any] = json.loads(content)
    schema = fields["schema"]
    if schema > SCHEMA:
        raise UserError(f"written by a newer version (schema {schema}, this is {SCHEMA})", where=directory)
    files = {name: File(**entry) for name, entry in fields["files"].items()}
    for name in files:
        if Path(name).name != name or name == "..":
            raise Damaged(f"the manifest names a file outside: {name!r}", where=directory)
    tensors = parse_tensors(fields["tensors"]) if schema > 1 else _whole_tensors(directory, files)
    fields |= {"files": files, "tensors": tensors}
    manifest = Manifest(**fields)
    used = {span.file for group in tensors.values() for stored in group.values() for span in stored.pieces}
    if not used <= files.keys():
        raise Damaged(
            f"tensors lie in files that it does not name: {min(used - files.keys())!r}", where=directory
        )
    match = NAME.fullmatch(directory.name)
    if match and int(match[2]) != manifest.step:
        raise Damaged(f"the name says step {match[2]}, the manifest says {manifest.step}", where=directory)
    return manifest


def parse_tensors(groups: Mapping[str, Mapping[str, Any]]) -> Groups:
    """The tensors of a manifest, or of one rank's part of it."""

    def span(entry: Mapping[str, Any]) -> Span:
        fields: dict[str, Any] = {key: tuple(entry[key]) for key in ("offset", "shape")}
        return Span(**(dict(entry) | fields))

    return {
        group: {
            name: Stored(entry["dtype"], tuple(entry["shape"]), tuple(map(span, entry["pieces"])))
            for name, entry in entries.items()
        }
        for group, entries in groups.items()
    }


def require_whole(stored: Stored, name: str) -> None:
    """The pieces of all ranks have to make up the tensor: each item once."""
    items = sum(math.prod(span.shape) for span in stored.pieces)
    if items != math.prod(stored.shape) or len({span.offset for span in stored.pieces}) < len(stored.pieces):
        raise Damaged(f"the pieces of {name} hold {items} items, the whole has {math.prod(stored.shape)}")


def verify_file(directory: Path, name: str, entry: File) -> None:
    """One file, by size and then by SHA-256."""
    path = directory / name
    if not path.is_file() or path.stat().st_size != entry.bytes:
        has = f"{path.stat().st_size} bytes" if path.is_file() else "missing"
        raise Damaged(f"{name} is {has}, should be {entry.bytes} bytes", where=directory)
    if digest(path) != entry.sha256:
        raise damage(name, directory)


def damage(name: str, directory: Path) -> Damaged:
    """The error for a file whose content is not what was written."""
    return Damaged(f"{name} is damaged: its SHA-256 does not match", where=directory)


def _seal_of(content: bytes) -> bytes:
    return f"{hashlib.sha256(content).hexdigest()}\n".encode()


def _whole_tensors(directory: Path, files: Mapping[str, File]) -> Groups:
    """Schema 1 names no tensors: the headers of its two files do."""
    groups: dict[str, dict[str, Stored]] = {}
    for group in (WEIGHTS, OPTIMIZER):
        name = f"{group}.safetensors"
        if name in files:
            groups[group] = dict(sorted(_read_header(directory, name, files[name]).items()))
    return groups


def _read_header(directory: Path, name: str, entry: File) -> dict[str, Stored]:
    """The tensors of a safetensors file, each as one piece."""
    try:
        with (directory / name).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(min(length, entry.bytes, HEADER_LIMIT)))
        header.pop("__metadata__", None)
        tensors: dict[str, Stored] = {}
        for key, tensor in header.items():
            begin, end = (8 + length + offset for offset in tensor["data_offsets"])
            shape = tuple(tensor["shape"])
            span = Span(name, begin, end, (0,) * len(shape), shape, "")
            tensors[key] = Stored(tensor["dtype"], shape, (span,))
        return tensors
    except FileNotFoundError as error:
        raise Damaged(f"{name} is missing, should be {entry.bytes} bytes", where=directory) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{name} is damaged: {error}", where=directory) from error
