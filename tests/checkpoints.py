"""Checkpoints as tests make and judge them: saved in one call, verified to the last byte, tidied."""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from glm_accelerate.checkpoint.checkpointer import Checkpointer, Save
from glm_accelerate.checkpoint.find import candidates, require_finite
from glm_accelerate.checkpoint.format import (
    OPTIMIZER,
    WEIGHTS,
    Damaged,
    Manifest,
    read_manifest,
    seal,
    verify_file,
)
from glm_accelerate.checkpoint.retain import Retained, choose_stale, delete, present
from glm_accelerate.config.schema import CheckpointSection
from glm_accelerate.parallel.part import part_of


@dataclass(frozen=True)
class Saved:
    """A checkpoint that exists."""

    path: Path
    bytes: int


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
    """Publish `checkpoints/checkpoint-<step>` in place."""
    groups = {
        group: {name: part_of(tensor) for name, tensor in tensors.items()}
        for group, tensors in ((WEIGHTS, weights), (OPTIMIZER, optimizer))
    }
    checkpointer = Checkpointer(run)
    checkpointer.save(Save(step, attempt, groups, state, fingerprints, facts))
    (outcome,) = checkpointer.outcomes()
    assert outcome.path is not None, outcome.error
    return Saved(outcome.path, outcome.bytes)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Put a manifest and its digest into a directory."""
    for name, content in seal(manifest).items():
        (directory / name).write_bytes(content)


def verify(directory: Path) -> Manifest:
    """The manifest, after every file it names was found whole."""
    manifest = read_manifest(directory)
    for name, entry in manifest.files.items():
        verify_file(directory, name, entry)
    return manifest


def latest(run: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose every byte verifies, and why newer ones were passed over."""
    found = candidates(run)
    reasons = list(found.reasons)
    for path in found.paths:
        try:
            require_finite(path, verify(path))
        except Damaged as error:
            reasons.append(f"passed over: {error}")
            continue
        return path, reasons
    return None, reasons


def keeping(
    last: int = 3,
    best: int = 1,
    every_steps: int | None = None,
    every_hours: float | None = None,
    thin: bool = False,
) -> CheckpointSection:
    """What a config says of keeping."""
    return CheckpointSection(
        keep_last=last,
        keep_best=best,
        keep_every_steps=every_steps,
        keep_every_hours=every_hours,
        thin=thin,
    )


def tidy(
    run: Path,
    section: CheckpointSection,
    *,
    run_id: str | None,
    losses: Mapping[int, float],
    pending: Collection[int] = (),
    jumped: int | None = None,
) -> Retained:
    """Delete what may go now, as a run does after each save."""
    entries = present(run, run_id=run_id, losses=losses, pending=pending, jumped=jumped)
    return delete(run, choose_stale(entries, section, time.time()))
