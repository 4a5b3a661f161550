"""The forward and backward passes of a step: its batches in, the loss out, gradients added to the parameters.

The loss is the sum over targets divided by the step's number of targets, so packing and accumulation are
exact: any division of the same samples into batches, and of batches to ranks, gives the same gradients.
"""

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
from glm_accelerate.parallel.place import SINGLE, Place
from glm_accelerate.runtime.device import send


class ForwardBackward(Protocol):
    """However a model lies over the ranks, this is how a step's gradients are made."""

    def __call__(self, step: Step, scale: float = 1.0) -> Tensor:
        """The loss of this rank's batches, on the device. Gradients are `scale` times those of the loss."""
        ...


@dataclass(frozen=True, slots=True)
class WholeModel:
    """Every rank runs all layers, on batches of its own. `offload`: activations wait in host memory."""

    model: Decoder
    device: torch.device
    place: Place = SINGLE
    offload: bool = False

    def __call__(self, step: Step, scale: float = 1.0) -> Tensor:
        together = self.place.samples[1] > 1  # ranks wait for each other: they run empty batches, too
        # A gradient that nothing is added to stays as its product made it; sums are float32.
        once = len(step.batches) == 1 and not together
        for part in self.model.modules():
            if isinstance(part, Linear):
                part.learn_in(torch.bfloat16 if once else torch.float32)
        total = torch.zeros((), device=self.device)
        for batch in step.batches:
            if batch.targets or together:
                loss = self.loss_of(batch, scale / max(1, step.targets))
                loss.backward()
                total += loss.detach()
        return total / scale

    def loss_of(self, batch: Batch, scale: float) -> Tensor:
        """`scale` times the losses of a batch's targets. Logits are made only where there is a target."""
        model, device = self.model, self.device
        tokens_RT = send(torch.from_numpy(batch.tokens_RT), device)
        with offload_activations(model, device) if self.offload else nullcontext():
            hidden_RTH = model.hidden(tokens_RT, Layout.of_documents(batch.documents, device))
        labels = batch.labels_RT.reshape(-1)
        learnt = np.flatnonzero(labels != IGNORED)
        rows_S = send(torch.from_numpy(learnt), device)
        labels_S = send(torch.from_numpy(labels[learnt]), device)
        hidden_SH = hidden_RTH.flatten(0, 1)[rows_S]
        form = form_now(model.form, model.training)
        return linear_cross_entropy(
            hidden_SH, model.head.weight, labels_S, form, scale=scale, copy_VH=model.head.copy
        )
