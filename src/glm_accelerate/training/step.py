"""One step: forward and backward, the gradients' norm, clipping, the update. The same on every rank."""

import math
from dataclasses import dataclass

import torch

from glm_accelerate.data.types import Step
from glm_accelerate.optim.mover import Mover
from glm_accelerate.parallel.part import whole
from glm_accelerate.parallel.place import SINGLE, Place
from glm_accelerate.training.passes import ForwardBackward


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step did. Not applied: its gradients were not finite and the weights are as before."""

    loss: float
    grad_norm: float
    applied: bool
    rate: float
    scale: float  # of the loss


def train_step(
    passes: ForwardBackward, mover: Mover, step: Step, rate: float, scale: float = 1.0, place: Place = SINGLE
) -> StepOutcome:
    """All ranks apply it or none does. `scale`: of the loss, in float16."""
    mover.begin(rate, sum(batch.targets > 0 for batch in step.batches))
    loss = passes(step, scale)
    mover.sum_gradients()
    norm_of_all = mover.norm(scale)
    both = torch.stack((loss, whole(norm_of_all).to(loss)))
    own, norm = both.tolist()  # only here the program waits for the device
    total, odd = place.total([own, not math.isfinite(norm)])
    applied = math.isfinite(total) and not odd and step.targets > 0
    if applied:
        mover.move(norm_of_all, scale)
    mover.end()
    return StepOutcome(total, norm, applied, rate, scale)
