"""Saving: tensors and JSON into a published directory, then the pointer to the newest."""

import json
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from glm_accelerate.checkpoint.find import FOLDER
from glm_accelerate.checkpoint.format import OPTIMIZER, STATE, WEIGHTS, File, Manifest, digest, write_manifest
from glm_accelerate.checkpoint.publish import publishing, write_text
from glm_accelerate.runtime.errors import UserError


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that exists."""

    path: Path
    bytes: int
    seconds: float


@contextmanager
def _writable(target: Path) -> Generator[None, None, None]:
    """Names what could not be written; what was published before is untouched."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        cure = "free space there and run the same command again: the checkpoints before it are whole"
        raise UserError(f"cannot be written: {error}", where=target, cure=cure) from error


def save(
    run: Path,
    step: int,
    attempt: int,
    *,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: Mapping[str, Any],
    fingerprints: Mapping[str, str],
    facts: Mapping[str, Any],
) -> Saved:
    """Publish `checkpoints/checkpoint-<step>` and point `latest` at it."""
    began = time.perf_counter()
    target = run / FOLDER / f"checkpoint-{step}"
    with _writable(target), publishing(target) as directory:
        for name, tensors in ((WEIGHTS, weights), (OPTIMIZER, optimizer)):
            save_file(
                {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, directory / name
            )
        (directory / STATE).write_text(json.dumps(state, indent=2, allow_nan=False), encoding="utf-8")
        files = {path.name: File(path.stat().st_size, digest(path)) for path in sorted(directory.iterdir())}
        write_manifest(directory, Manifest(step, attempt, files, dict(fingerprints), dict(facts)))
    write_text(run / FOLDER / "latest", target.name + "\n")
    return Saved(target, sum(file.bytes for file in files.values()), time.perf_counter() - began)
