"""All of a run's resume state: the tensors that training changes, and how far it is (`Progress`).

The order of samples and the randomness of step k follow from the seed, k and the share of the samples that a
rank takes; so no generator, no permutation and no packing is stored, and any number of ranks can go on.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from glm_accelerate.assemble.tensors import TensorSource, put
from glm_accelerate.checkpoint.format import OPTIMIZER, WEIGHTS
from glm_accelerate.data.pack import BY_TOKENS, Dealing
from glm_accelerate.data.types import Step
from glm_accelerate.evaluate.protocol.history import EvaluationHistory
from glm_accelerate.optim.mover import Mover
from glm_accelerate.optim.precision import Scale, rescale
from glm_accelerate.optim.state import MASTER, shaped_otherwise
from glm_accelerate.parallel.part import Part
from glm_accelerate.parallel.table import ONE_PROCESS
from glm_accelerate.plan.budget import Pace
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.training.spike import Level, follow

Pieces = dict[str, dict[str, Part]]


@dataclass(frozen=True, slots=True)
class Wide:
    """The layers that float16 cannot hold, and before which step that was measured."""

    step: int
    layers: tuple[str, ...]


@dataclass(slots=True)
class Progress:
    """How far a run is. The one mutable object of the training loop."""

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
    dealing: Dealing | None = None  # by what ranks get their samples; None: no two have different ones
    pace: Pace | None = None  # of evaluations, where they have a budget

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

    @property
    def loss_scale(self) -> float:
        """The factor of the loss: in float16 its gradients would vanish otherwise."""
        return 1.0 if self.scale is None else self.scale.value

    def to_json(self) -> dict[str, Any]:
        """For state.json."""
        return asdict(self) | {"judging": self.judging.to_json()}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> "Progress":
        """What `to_json` gave. The first checkpoints have no level and no history of evaluations."""
        losses = {int(step): loss for step, loss in fields["losses"].items()}
        scale, wide, judging = fields.get("scale"), fields.get("wide"), fields.get("judging")
        # Before there was a choice, samples were dealt by tokens.
        dealing, pace = fields.get("dealing", asdict(BY_TOKENS)), fields.get("pace")
        counts = {key: int(value) for key, value in fields.items() if isinstance(value, int)}
        return Progress(
            **counts,
            losses=losses,
            judging=EvaluationHistory() if judging is None else EvaluationHistory.from_json(judging),
            level=Level(**fields.get("level", {})),
            scale=None if scale is None else Scale(**scale),
            wide=None if wide is None else Wide(wide["step"], tuple(wide["layers"])),
            dealing=None if dealing is None else replace(Dealing(**dealing), speeds=tuple(dealing["speeds"])),
            pace=None if pace is None else Pace(**pace),
        )


def resume_tensors(mover: Mover) -> Pieces:
    """The parts of weights and moments that this rank saves."""
    table = mover.table
    assert table is not ONE_PROCESS, "a mover without a table of what it moves"

    def owned(tensors: Mapping[str, Tensor]) -> dict[str, Part]:
        parts = {name: table.part(name, tensor) for name, tensor in tensors.items()}
        return {name: part for name, part in parts.items() if part.owned}

    return {WEIGHTS: owned(table.weights), OPTIMIZER: owned(mover.state(table.weights.items()))}


def restore(
    source: TensorSource, model: nn.Module, mover: Mover, where: object, *, begun: bool = True
) -> None:
    """Load weights and moments, whatever number of ranks they came from.

    `begun`: some step was applied. Before that, while a loss scale comes down, there are no moments.
    """
    if begun and not source.names(OPTIMIZER):
        raise UserError(
            "holds weights only: a run cannot go on from it", where=where, cure="a new run with --init-from"
        )
    table = mover.table
    put(model, source, where, table)
    weights = table.weights
    moments: dict[str, Tensor] = {}
    for key in source.names(OPTIMIZER):
        name, _, moment = key.partition("::")
        if name not in weights:  # another stage has it
            continue
        if shaped_otherwise(moment) or table.whole(name, weights[name]):  # whole on every rank
            moments[key] = source.tensor(OPTIMIZER, key)
        else:
            moments[key] = table.restore(name, weights[name], partial(source.tensor, OPTIMIZER, key))
    for name, _, ahead in mover.masters(weights.items()):
        if ahead:  # files may have more digits than the device's weights
            moments.setdefault(f"{name}::{MASTER}", source.tensor(WEIGHTS, name))
    mover.load(weights.items(), moments)
