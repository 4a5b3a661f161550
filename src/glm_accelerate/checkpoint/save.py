"""Saving in place, in one call: for those who keep no Checkpointer."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from glm_accelerate.checkpoint.checkpointer import Checkpointer, Save
from glm_accelerate.checkpoint.format import FOLDER, OPTIMIZER, WEIGHTS, Piece
from glm_accelerate.runtime.errors import UserError


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that exists."""

    path: Path
    bytes: int
    seconds: float


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
    groups = {
        group: {name: Piece.whole(tensor) for name, tensor in tensors.items()}
        for group, tensors in ((WEIGHTS, weights), (OPTIMIZER, optimizer))
    }
    checkpointer = Checkpointer(run)
    checkpointer.save(Save(step, attempt, groups, state, fingerprints, facts))
    (outcome,) = checkpointer.outcomes()
    if outcome.path is None:
        target = run / FOLDER / f"checkpoint-{step}"
        cure = "free space there and run the same command again: the checkpoints before it are whole"
        raise UserError(str(outcome.error), where=target, cure=cure)
    return Saved(outcome.path, outcome.bytes, outcome.total_seconds)
