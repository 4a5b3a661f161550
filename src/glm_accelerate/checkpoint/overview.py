"""What is known of a run's checkpoints without reading them: for people and for tools.

Which is the best, evaluations say (RUN/best): of one that is a snapshot alone there is a line, too.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from glm_accelerate.checkpoint.find import best_of, check, published
from glm_accelerate.checkpoint.format import MANIFEST, Kind, path_of
from glm_accelerate.checkpoint.lease import is_leased
from glm_accelerate.runtime.errors import UserError


@dataclass(frozen=True, slots=True)
class Seen:
    """One checkpoint, or the best snapshot. What a damaged manifest does not tell is None."""

    step: int
    path: str
    damage: str | None  # what the cheap checks found
    bytes: int | None = None
    written: float | None = None  # Unix time
    loss: float | None = None  # held out
    best: bool = False
    leased: bool = False
    nonfinite: bool = False
    suspect: int | None = None  # the step at which the training loss jumped, if it was not back
    codec: str | None = None
    ranks: int | None = None
    kind: Kind = "checkpoint"


def overview(run: Path, losses: Mapping[int, float] | None = None) -> list[Seen]:
    """Newest first. `losses`: held out, by step, as evaluations beside training found them."""
    best, paths = best_of(run), published(run)
    if best is not None and path_of(run, "checkpoint", _step(best)) not in paths:
        paths = sorted([best, *paths], key=_step, reverse=True)
    return [_look(path, best is not None and _step(path) == _step(best), losses or {}) for path in paths]


def _step(path: Path) -> int:
    return int(path.name.partition("-")[2])


def _look(path: Path, best: bool, losses: Mapping[int, float]) -> Seen:
    step = _step(path)
    kind: Kind = "snapshot" if path.name.startswith("snapshot") else "checkpoint"
    try:
        manifest = check(path)
        written = (path / MANIFEST).stat().st_mtime
    except (UserError, OSError) as error:
        return Seen(step, str(path), str(error), kind=kind)
    loss = losses.get(step, manifest.facts.get("loss"))
    return Seen(
        step=step,
        path=str(path),
        damage=None,
        bytes=manifest.bytes,
        written=written,
        loss=loss if isinstance(loss, float) and math.isfinite(loss) else None,
        best=best,
        leased=is_leased(path),
        nonfinite=bool(manifest.facts.get("nonfinite")),
        suspect=manifest.facts.get("suspect"),
        codec=manifest.codec,
        ranks=manifest.ranks,
        kind=kind,
    )
