"""One update: the norm of all gradients together, the factor that holds it down, and the step.

norm = gradient_norm(optimizer);  apply(optimizer, rate, share(norm, limit))
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from glm_accelerate.optim.host import HostOptimizer
from glm_accelerate.optim.one_pass import OnePassAdamW


def gradient_norm(optimizer: Optimizer, scale: float = 1.0) -> Tensor:
    """Before clipping. Of gradients of a loss times `scale`, it is that of the loss."""
    gradients = _gradients(optimizer)
    if isinstance(optimizer, HostOptimizer) and not all(map(_plain, gradients)):  # summed in float32
        return torch.stack([vector_norm(each, dtype=torch.float32) for each in gradients]).norm() / scale
    if gradients and isinstance(optimizer, OnePassAdamW):
        return torch.tensor(torch.ops.glm_accelerate.squares(gradients)).sqrt() / scale
    return _total_norm(gradients) / scale


def share(norm: Tensor, limit: float, scale: float = 1.0) -> Tensor:
    """By what gradients times `scale` are multiplied so that their norm is at most `limit` (0: never)."""
    return ((limit / (norm + 1e-6)).clamp(max=1.0) if limit > 0 else torch.ones_like(norm)) / scale


def apply(optimizer: Optimizer, learning_rate: float, factor: Tensor) -> None:
    """Move the weights by their gradients times `factor`, at this rate. Does not wait for the device."""
    set_rate(optimizer, learning_rate)
    if isinstance(optimizer, OnePassAdamW | HostOptimizer):
        optimizer.factor = factor.item()
    elif factor.device.type != "cpu" or factor != 1:  # a CPU can look without waiting
        torch._foreach_mul_(_gradients(optimizer), factor)  # pyright: ignore[reportPrivateUsage]
    optimizer.step()


def set_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """Use this rate from the next step on."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao's: its compiled updates read it
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    if isinstance(optimizer, HostOptimizer):
        return optimizer.gradients()
    weights: list[Tensor] = [weight for group in optimizer.param_groups for weight in group["params"]]
    return [weight.grad for weight in weights if weight.grad is not None]


def _total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """torch's norm of a large tensor takes one core of a CPU, its product of two vectors takes all."""
    if not gradients or not all(_plain(gradient) for gradient in gradients):
        return get_total_norm(gradients)
    squares = [torch.dot(gradient.view(-1), gradient.view(-1)) for gradient in gradients]
    return torch.stack(squares).double().sum().sqrt().float()


def _plain(gradient: Tensor) -> bool:
    """On the CPU alone, in float32, one after the other in memory."""
    whole = type(gradient) is Tensor and gradient.device.type == "cpu"
    return whole and gradient.dtype == torch.float32 and gradient.is_contiguous()
