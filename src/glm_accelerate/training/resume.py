"""A run's state loaded from the first of its checkpoints that is whole, or from a stock one."""

from dataclasses import dataclass
from pathlib import Path

from glm_accelerate.assemble.foreign import read_foreign
from glm_accelerate.checkpoint.find import require_finite
from glm_accelerate.checkpoint.format import Damaged
from glm_accelerate.checkpoint.lease import lease
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.optim.mover import Mover
from glm_accelerate.training.directory import read_first
from glm_accelerate.training.mismatch import check
from glm_accelerate.training.settle import Settled
from glm_accelerate.training.state import Progress, restore


@dataclass(frozen=True, slots=True)
class Resumed:
    """How far the run is."""

    progress: Progress
    step: int  # that it goes on from
    attempt: int = 0  # that saved it; 0: none of this run
    warnings: tuple[str, ...] = ()


def resume(settled: Settled, model: Decoder, mover: Mover) -> tuple[Resumed | None, list[str]]:
    """What the run goes on from (None: it begins), and warnings, which name the checkpoints passed over."""
    ranks = settled.ranks

    def read_together(path: Path) -> Resumed:
        """Each rank reads its own parts; if one finds damage, all pass the checkpoint over."""
        resumed, damage = None, None
        try:
            read = _foreign if settled.choice.foreign else _own
            resumed = read(settled, path, model, mover)
        except Damaged as error:
            damage = error
        damaged = any(ranks.total([damage is not None]))
        if damage is not None:
            raise damage
        if damaged or resumed is None:
            raise Damaged("damaged, as another rank found", where=path)
        return resumed

    resumed, passed_over = read_first(settled.choice, read_together)
    return resumed, [*passed_over, *(resumed.warnings if resumed is not None else ())]


def _own(settled: Settled, path: Path, model: Decoder, mover: Mover) -> Resumed:
    with lease(path):
        reader = Reader(path)
        require_finite(path, reader.manifest)
        warnings = check(reader.manifest.fingerprints, settled.prints, path, settled.start.accept)
        progress = Progress.from_json(reader.state())
        restore(reader, model, mover, path, begun=progress.applied > 0)
        attempt = reader.manifest.attempt if reader.manifest.run in ("", settled.run_id) else 0
        return Resumed(progress, progress.position, attempt, tuple(warnings))


def _foreign(settled: Settled, path: Path, model: Decoder, mover: Mover) -> Resumed:
    foreign = read_foreign(path, settled.model_dir, settled.config.adapt, settled.directory)
    begun = bool(foreign.optimizer)  # else the weights alone go on, and a note says so
    restore(foreign.source, model, mover, path, begun=begun)
    progress = Progress(position=foreign.step, applied=foreign.step)
    return Resumed(progress, foreign.step, warnings=tuple(foreign.notes))
