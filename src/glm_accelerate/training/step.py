"""One step: forward and backward, the gradients' norm, clipping, the update. The same on every rank.

The loss is the sum over targets divided by the step's number of targets, so packing and accumulation are
exact: any division of the same samples into batches, and of batches to ranks, gives the same gradients.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from glm_accelerate.data.types import IGNORED, Batch, Step
from glm_accelerate.kernels.choose import form_now
from glm_accelerate.kernels.linear_cross_entropy import linear_cross_entropy
from glm_accelerate.memory.offload import offload_activations
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.layout import Layout
from glm_accelerate.models.linear import Linear
from glm_accelerate.optim.mover import Mover
from glm_accelerate.parallel.part import whole
from glm_accelerate.parallel.pipeline import Stage
from glm_accelerate.parallel.place import SINGLE, Place
from glm_accelerate.parallel.shard import keep_gathered
from glm_accelerate.plan.schedule import one_forward_one_backward
from glm_accelerate.runtime.device import send
from glm_accelerate.runtime.seed import seed_all, step_seed


class ForwardBackward(Protocol):
    """How a step's gradients are computed, however the model is divided over the ranks."""

    def __call__(self, step: Step, scale: float = 1.0) -> Tensor:
        """The loss of this rank's batches, on the device. Gradients are `scale` times those of the loss."""
        ...


@dataclass(frozen=True, slots=True)
class WholeModel:
    """Every rank runs all layers, on batches of its own. `offload`: activations wait in host memory.
    `before`: called before each backward pass, and whether it is the step's last.
    """

    model: Decoder
    device: torch.device
    place: Place = SINGLE
    offload: bool = False
    before: Callable[[bool], None] = lambda last: None

    def __call__(self, step: Step, scale: float = 1.0) -> Tensor:
        batches = self.prepare(step)
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches, 1):
            loss = self.loss_of(batch, scale / max(1, step.targets))
            self.before(number == len(batches))
            loss.backward()
            total += loss.detach()
        return total / scale

    def prepare(self, step: Step) -> list[Batch]:
        """The batches to run; weights are told in which dtype to add gradients up."""
        # A gradient that nothing is added to stays as its product made it; sums are float32.
        once = len(step.batches) == 1 and self.place.samples[1] == 1
        for part in self.model.modules():
            if isinstance(part, Linear):
                part.learn_in(torch.bfloat16 if once else torch.float32)
        return batches_of(step, self.place)

    def hidden_of(self, batch: Batch) -> Tensor:
        """What the layers make of a batch."""
        tokens_RT = send(torch.from_numpy(batch.tokens_RT), self.device)
        with offload_activations(self.model, self.device) if self.offload else nullcontext():
            layout = Layout.of_documents(batch.documents, self.device, batch.pieces)
            return self.model.hidden(tokens_RT, layout)

    def loss_of(self, batch: Batch, scale: float) -> Tensor:
        """`scale` times the losses of a batch's targets. Logits are made only where there is a target."""
        model, device, hidden_RTH = self.model, self.device, self.hidden_of(batch)
        labels = batch.labels_RT.reshape(-1)
        targets = np.flatnonzero(labels != IGNORED)
        rows_S = send(torch.from_numpy(targets), device)
        labels_S = send(torch.from_numpy(labels[targets]), device)
        hidden_SH = hidden_RTH.flatten(0, 1)[rows_S]
        form = form_now(model.form, model.training)
        return linear_cross_entropy(
            hidden_SH,
            model.head.weight,
            labels_S,
            form,
            scale=scale,
            copy_VH=model.head.copy,
            part=model.words,
        )


@dataclass(frozen=True, slots=True)
class StagedModel:
    """Every rank runs the layers of one stage on the same batches as the other stages. Forward and backward
    take turns, so that all stages work at once. The loss is the last stage's.
    """

    whole: WholeModel
    stage: Stage

    def __call__(self, step: Step, scale: float = 1.0) -> Tensor:
        model, stage, batches = self.whole, self.stage, self.whole.prepare(step)
        total = torch.zeros((), device=model.device)
        waiting: dict[int, tuple[Tensor | None, Tensor]] = {}
        _draw_apart(stage.index)
        if stage.watch is not None:
            stage.watch.go()
        for way, number in one_forward_one_backward(stage.index, stage.count, len(batches)):
            if way == "backward":
                model.before(number == len(batches) - 1)
                stage.backward(*waiting.pop(number))
            elif stage.last:
                loss = model.loss_of(batches[number], scale / max(1, step.targets))
                waiting[number] = stage.entered, loss
                total += loss.detach()
            else:
                out = model.hidden_of(batches[number])
                waiting[number] = stage.entered, out
        if stage.watch is not None:
            stage.watch.stop()
        stage.finish(model.model.embed)
        return total / scale


def batches_of(step: Step, place: Place) -> list[Batch]:
    """Those that are run. Ranks that take different samples wait for each other: they run empty ones, too."""
    return [batch for batch in step.batches if batch.targets or place.samples[1] > 1]


def forward_backward_of(
    model: Decoder, device: torch.device, place: Place = SINGLE, offload: bool = False, zero: int = 3
) -> ForwardBackward:
    """What makes a step's gradients with this model, as it lies over the ranks."""
    all_layers = WholeModel(model, device, place, offload, keep_gathered(model, zero))
    return StagedModel(all_layers, model.stage) if isinstance(model.stage, Stage) else all_layers


def _draw_apart(number: int) -> None:
    """Stages draw other numbers than each other, from the step's on."""
    if number:
        seed_all(step_seed(int(torch.randint(1 << 62, ())), number))


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step did. Not applied: its gradients were not finite, or it had no targets; the weights are as
    before.
    """

    loss: float
    grad_norm: float
    applied: bool
    rate: float
    scale: float  # of the loss


def train_step(
    passes: ForwardBackward, mover: Mover, step: Step, rate: float, scale: float = 1.0, place: Place = SINGLE
) -> StepOutcome:
    """All ranks apply the update or none does. `scale`: of the loss, in float16."""
    mover.begin(rate, len(batches_of(step, place)))
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
