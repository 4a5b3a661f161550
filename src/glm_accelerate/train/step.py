"""One optimizer update: forward and backward over the step's batches, clip, update.

The loss is the sum over targets divided by the step's number of targets, so packing and accumulation are
exact: any division of the same samples into batches, and of batches to ranks, gives the same gradients.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from glm_accelerate.data.types import IGNORED, Batch, Step
from glm_accelerate.kernels.choose import form_now
from glm_accelerate.kernels.linear_cross_entropy import linear_cross_entropy
from glm_accelerate.memory.offload import offload_activations
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.layout import Layout
from glm_accelerate.models.linear import Linear
from glm_accelerate.optim.fused_backward import FusedBackward
from glm_accelerate.optim.update import apply, gradient_norm, set_rate, share
from glm_accelerate.parallel.part import whole
from glm_accelerate.parallel.ranks import ALONE, Ranks
from glm_accelerate.parallel.reduce import sum_gradients
from glm_accelerate.runtime.device import send


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What an update did. Not applied: its gradients were not finite and the weights are as before."""

    loss: float
    grad_norm: float
    applied: bool


def batch_loss(
    model: Decoder, batch: Batch, device: torch.device, scale: float = 1.0, *, offload: bool = False
) -> Tensor:
    """`scale` times the losses of a batch's targets. Logits are made only where there is a target.

    `offload`: what the backward pass needs waits for it in host memory.
    """
    tokens_RT = send(torch.from_numpy(batch.tokens_RT), device)
    with offload_activations(model, device) if offload else nullcontext():
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


def forward_backward(
    model: Decoder,
    step: Step,
    device: torch.device,
    *,
    together: bool = False,
    scale: float = 1.0,
    offload: bool = False,
) -> Tensor:
    """Adds the gradients of this rank's batches to the parameters; returns their loss, on the device.

    `together`: the model is divided over ranks, so that batches without targets are run too.
    `scale`: the gradients are so many times those of the loss.
    """
    # A gradient that nothing is added to stays as its product made it; sums are float32.
    once = len(step.batches) == 1 and not together
    for part in model.modules():
        if isinstance(part, Linear):
            part.learn_in(torch.bfloat16 if once else torch.float32)
    total = torch.zeros((), device=device)
    for batch in step.batches:
        if batch.targets or together:
            loss = batch_loss(model, batch, device, scale / max(1, step.targets), offload=offload)
            loss.backward()
            total += loss.detach()
    return total / scale


def update(
    model: Decoder,
    optimizer: Optimizer,
    step: Step,
    device: torch.device,
    *,
    learning_rate: float,
    limit: float,
    ranks: Ranks = ALONE,
    scale: float = 1.0,
    offload: bool = False,
    fused: FusedBackward | None = None,
) -> StepOutcome:
    """One whole step, the same on every rank: all apply it or none does. `scale`: of the loss, in float16.

    `fused`: weights move within the backward pass, up to a gradient that is not finite.
    """
    if fused is not None:
        set_rate(optimizer, learning_rate)
        fused.begin(sum(batch.targets > 0 for batch in step.batches))
    loss = forward_backward(model, step, device, together=ranks.count > 1, scale=scale, offload=offload)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sum_gradients(trained, ranks)
    norm_of_all = gradient_norm(optimizer, scale) if fused is None else fused.end()
    own, norm = torch.stack((loss, whole(norm_of_all).to(loss))).tolist()  # the one place that waits
    total, odd = ranks.total([own, not math.isfinite(norm)])
    applied = math.isfinite(total) and not odd and step.targets > 0
    if applied and fused is None:
        apply(optimizer, learning_rate, share(norm_of_all, limit, scale))
    optimizer.zero_grad(set_to_none=True)
    return StepOutcome(total, norm, applied)
