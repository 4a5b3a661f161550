"""All of a run's resume state: what training moves (tensors), and where it stands (`Progress`). Nothing else.

The order of samples and the randomness of step k on a rank follow from the seed, k and the rank; so no
generator, no permutation and no packing is stored, and any number of ranks can go on.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from glm_accelerate.assemble.tensors import TensorSource, put, trained
from glm_accelerate.checkpoint.format import OPTIMIZER, WEIGHTS, Piece
from glm_accelerate.data.types import Step
from glm_accelerate.evaluate.protocol.history import EvaluationHistory
from glm_accelerate.optim.host import HostOptimizer
from glm_accelerate.optim.precision import Scale, rescale
from glm_accelerate.optim.state import MASTER, load_optimizer_state, optimizer_state, shaped_otherwise
from glm_accelerate.parallel.part import as_part, part_of
from glm_accelerate.parallel.ranks import Ranks
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.train.spike import Level, follow

Pieces = dict[str, dict[str, Piece]]


@dataclass(frozen=True, slots=True)
class Wide:
    """The layers that float16 cannot hold, and before which step that was measured."""

    step: int
    layers: tuple[str, ...]


@dataclass(slots=True)
class Progress:
    """Where a run stands. The one mutable object of the training loop."""

    position: int = 0  # steps whose samples are consumed
    applied: int = 0  # steps that moved the weights: what the schedule counts
    bad_in_a_row: int = 0  # steps in a row whose gradients were not finite, whatever the loss scale
    bad: int = 0  # all of them
    tokens: int = 0  # unpadded, over the whole run
    losses: dict[int, float] = field(default_factory=dict)  # held-out loss by step
    judging: EvaluationHistory = field(default_factory=EvaluationHistory)  # of evaluations
    level: Level = field(default_factory=Level)  # of the training loss
    scale: Scale | None = None  # of the loss, in float16
    wide: Wide | None = None  # in float16, once it is measured

    def record(self, step: Step, applied: bool, loss: float, patience: int) -> None:
        """A step is over. One that was not applied uses up its samples but does not advance the schedule.

        In float16 it is no bad one while the loss scale can still be lowered.
        """
        bad = not applied
        if self.scale is not None and (applied or step.targets):
            bad = bad and self.scale.lowest
            self.scale = rescale(self.scale, applied, patience=patience)
        self.position = step.number
        self.tokens += step.tokens
        self.applied += applied
        self.bad += bad
        self.bad_in_a_row = 0 if applied else self.bad_in_a_row + bad
        if applied:
            self.level = follow(self.level, step.number, loss)

    def to_json(self) -> dict[str, Any]:
        """For state.json."""
        return asdict(self) | {"judging": self.judging.to_json()}

    @staticmethod
    def from_json(said: dict[str, Any]) -> "Progress":
        """What `to_json` gave."""
        losses = {int(step): loss for step, loss in said["losses"].items()}
        level = Level(**said.get("level", {}))  # not in the first checkpoints
        scale, wide = said.get("scale"), said.get("wide")
        rest = {key: int(value) for key, value in said.items() if isinstance(value, int)}
        return Progress(
            **rest,
            losses=losses,
            judging=EvaluationHistory.from_json(said["judging"])
            if "judging" in said
            else EvaluationHistory(),
            level=level,
            scale=None if scale is None else Scale(**scale),
            wide=None if wide is None else Wide(wide["step"], tuple(wide["layers"])),
        )


def moved(model: nn.Module, optimizer: Optimizer, ranks: Ranks) -> Pieces:
    """The parts of weights and moments for which this rank answers."""
    weights = trained(model)
    moments = optimizer_state(optimizer, weights.items())
    return {WEIGHTS: _owned(weights, ranks), OPTIMIZER: _owned(moments, ranks)}


def restore(
    source: TensorSource,
    model: nn.Module,
    optimizer: Optimizer,
    ranks: Ranks,
    where: object,
    *,
    begun: bool = True,
) -> None:
    """Put weights and moments back, of whatever number of ranks they came from.

    `begun`: some step was applied. Before that, while a loss scale comes down, there are no moments.
    """
    if begun and not source.names(OPTIMIZER):
        raise UserError(
            "holds weights only: a run cannot go on from it", where=where, cure="a new run with --init-from"
        )
    put(model, source, where, ranks)
    weights = trained(model)
    moments: dict[str, Tensor] = {}
    for key in source.names(OPTIMIZER):
        name, _, moment = key.partition("::")
        if shaped_otherwise(moment) or not isinstance(weights[name], DTensor):  # whole on every rank
            moments[key] = source.tensor(OPTIMIZER, key)
        else:
            part = part_of(weights[name], ranks)
            found = source.tensor(OPTIMIZER, key, part.offset, part.local.shape)
            moments[key] = as_part(found.to(part.local.device), weights[name])
    if isinstance(optimizer, HostOptimizer):  # files may know more digits than the device's weights
        for name, _, ahead in optimizer.masters(weights.items()):
            if ahead:
                moments.setdefault(f"{name}::{MASTER}", source.tensor(WEIGHTS, name))
    load_optimizer_state(optimizer, weights.items(), moments)


def _owned(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Piece]:
    parts = {name: part_of(tensor, ranks) for name, tensor in tensors.items()}
    return {name: Piece(part.local, part.shape, part.offset) for name, part in parts.items() if part.owned}
