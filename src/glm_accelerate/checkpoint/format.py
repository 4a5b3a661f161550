"""What a checkpoint is on disk: safetensors and JSON, a manifest with the size and SHA-256 of each file, and
the manifest's own digest beside it. A directory is a checkpoint if, and only if, its manifest says so.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from glm_accelerate.runtime.errors import UserError

SCHEMA = 1
MANIFEST, DIGEST = "manifest.json", "manifest.sha256"
WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})", re.ASCII)


@dataclass(frozen=True, slots=True)
class File:
    """One file of a checkpoint."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds and what it was made with."""

    step: int
    attempt: int
    files: Mapping[str, File]
    fingerprints: Mapping[str, str]  # of model, data, tokenizer, template, optimizer, environment
    facts: Mapping[str, Any] = field(default_factory=dict)  # for people and tools: held-out loss, method
    schema: int = SCHEMA


def step_of(name: str) -> int | None:
    """The step that a directory's name stands for, if it is a checkpoint's name at all."""
    match = NAME.fullmatch(name)
    return int(match[1]) if match else None


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """The last two files of a checkpoint."""
    text = json.dumps(asdict(manifest), indent=2, sort_keys=True, allow_nan=False)
    (directory / MANIFEST).write_text(text, encoding="utf-8")
    (directory / DIGEST).write_text(hashlib.sha256(text.encode()).hexdigest() + "\n", encoding="ascii")


def read_manifest(directory: Path) -> Manifest:
    """The manifest, if it is whole. Raises a UserError that says what is wrong otherwise."""
    try:
        text = (directory / MANIFEST).read_text(encoding="utf-8")
        wanted = (directory / DIGEST).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise UserError(f"not a whole checkpoint: {error}", where=directory) from error
    if hashlib.sha256(text.encode()).hexdigest() != wanted:
        raise UserError("the manifest does not match its digest", where=directory / MANIFEST)
    said: dict[str, Any] = json.loads(text)
    if said["schema"] > SCHEMA:
        raise UserError(
            f"written by a newer version (schema {said['schema']}, this is {SCHEMA})", where=directory
        )
    said["files"] = {name: File(**entry) for name, entry in said["files"].items()}
    return Manifest(**said)


def verify(directory: Path) -> Manifest:
    """The manifest, after every file it names was found whole."""
    manifest = read_manifest(directory)
    named = step_of(directory.name)
    if named is not None and named != manifest.step:
        raise UserError(f"the name says step {named}, the manifest says {manifest.step}", where=directory)
    for name, entry in manifest.files.items():
        path = directory / name
        if Path(name).name != name:
            raise UserError(f"the manifest names a file outside: {name!r}", where=directory)
        if not path.is_file() or path.stat().st_size != entry.bytes:
            has = f"{path.stat().st_size} bytes" if path.is_file() else "missing"
            raise UserError(f"{name} is {has}, should be {entry.bytes} bytes", where=directory)
        if digest(path) != entry.sha256:
            raise UserError(f"{name} is damaged: its SHA-256 does not match", where=directory)
    return manifest
