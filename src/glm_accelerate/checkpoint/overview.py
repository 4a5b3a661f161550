"""What is known of a run's checkpoints without reading them: for people and for tools."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from glm_accelerate.checkpoint.find import check, published
from glm_accelerate.checkpoint.format import MANIFEST, step_of
from glm_accelerate.checkpoint.lease import is_leased
from glm_accelerate.runtime.errors import UserError


@dataclass(frozen=True, slots=True)
class Seen:
    """One checkpoint. What a damaged manifest does not tell is None."""

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


def overview(run: Path) -> list[Seen]:
    """Newest first."""
    seen = [_look(path) for path in published(run)]
    judged = [(one.loss, one.step) for one in seen if one.loss is not None and not one.damage]
    best = min(judged)[1] if judged else None
    return [replace(one, best=True) if one.step == best else one for one in seen]


def _look(path: Path) -> Seen:
    step = step_of(path.name)
    assert step is not None
    try:
        manifest = check(path)
        written = (path / MANIFEST).stat().st_mtime
    except (UserError, OSError) as error:
        return Seen(step, str(path), str(error))
    loss = manifest.facts.get("loss")
    return Seen(
        step=step,
        path=str(path),
        damage=None,
        bytes=sum(file.bytes for file in manifest.files.values()),
        written=written,
        loss=loss if isinstance(loss, float) and math.isfinite(loss) else None,
        leased=is_leased(path),
        nonfinite=bool(manifest.facts.get("nonfinite")),
        suspect=manifest.facts.get("suspect"),
        codec=manifest.codec,
        ranks=manifest.ranks,
    )
