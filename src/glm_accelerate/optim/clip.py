"""The norm of all gradients together, and the factor that holds it down."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm


def clip(parameters: Iterable[Tensor], limit: float, scale: float = 1.0) -> Tensor:
    """Scale the gradients so that their norm is at most `limit` (0: never). Returns the norm before.

    Gradients of a loss times `scale` are divided by it in the same pass. Nothing here waits for the device:
    from a norm that is not finite come gradients that are not, and who reads the norm skips the step.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = _total_norm(gradients) / scale
    if gradients and (limit > 0 or scale != 1):
        share = (limit / (norm + 1e-6)).clamp(max=1.0) if limit > 0 else torch.ones_like(norm)
        if share.device.type != "cpu" or share != scale:  # a CPU can look without waiting
            torch._foreach_mul_(gradients, share / scale)  # pyright: ignore[reportPrivateUsage]
    return norm


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
