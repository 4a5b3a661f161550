"""Every byte of a checkpoint against its manifest, and how two checkpoints differ."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from glm_accelerate.checkpoint.format import (
    DIGEST,
    MANIFEST,
    OPTIMIZER,
    WEIGHTS,
    Damaged,
    read_manifest,
    verify_file,
)
from glm_accelerate.checkpoint.read import Reader

NONE = "none"  # shown where one of the two has nothing


@dataclass(frozen=True, slots=True)
class Audit:
    """What is wrong with a checkpoint, each line naming a file, and files that do not belong to it."""

    damaged: tuple[str, ...]
    strange: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that differs between two checkpoints; `most`: by how much, where both are finite numbers."""

    kind: str  # weights, optimizer, fingerprint, state
    name: str
    first: str
    second: str
    most: float | None = None


def audit(directory: Path) -> Audit:
    """Reads all of it, and does not stop at the first damage."""
    try:
        manifest = read_manifest(directory)
    except Damaged as error:
        # A digest that does not match speaks for two files: nothing says which of them is as it was.
        both = f"{MANIFEST} or {DIGEST} is damaged: the manifest"
        return Audit((str(error).replace(f"{MANIFEST}: the manifest", both),), ())
    damaged: list[str] = []
    for name, entry in manifest.files.items():
        try:
            verify_file(directory, name, entry)
        except (Damaged, OSError) as error:
            damaged.append(str(error))
    belonging = {*manifest.files, MANIFEST, DIGEST}
    strange = sorted(path.name for path in directory.iterdir() if path.name not in belonging)
    return Audit(tuple(damaged), tuple(strange))


def compare(first: Path, second: Path) -> Iterator[Difference]:
    """Everything that differs, tensor by tensor."""
    one, other = Reader(first), Reader(second)
    for group in (WEIGHTS, OPTIMIZER):
        yield from _tensors(group, one, other)
    yield from _values("fingerprint", one.manifest.fingerprints, other.manifest.fingerprints)
    yield from _values("state", _flat(one.state()), _flat(other.state()))


def _tensors(group: str, one: Reader, other: Reader) -> Iterator[Difference]:
    for name in sorted({*one.names(group), *other.names(group)}):
        stored = [reader.manifest.tensors.get(group, {}).get(name) for reader in (one, other)]
        first, second = (f"{entry.dtype} {list(entry.shape)}" if entry else NONE for entry in stored)
        if first != second:
            yield Difference(group, name, first, second)
            continue
        a, b = one.tensor(group, name), other.tensor(group, name)
        if torch.equal(a.view(torch.uint8) if a.ndim else a, b.view(torch.uint8) if b.ndim else b):
            continue
        most = (a.double() - b.double()).abs().max().item()
        yield Difference(group, name, first, second, most if math.isfinite(most) else None)


def _values(kind: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Difference]:
    for name in sorted({*one, *other}):
        first, second = (str(side.get(name, NONE)) for side in (one, other))
        if first != second:
            yield Difference(kind, name, first, second)


def _flat(state: Mapping[str, Any]) -> dict[str, Any]:
    """`losses.300` for the value of losses at 300."""
    flat: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": item for key, item in _flat(value).items()}
        else:
            flat[name] = value
    return flat
