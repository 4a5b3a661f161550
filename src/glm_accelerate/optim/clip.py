"""The norm of all gradients together, and the factor that holds it down."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip(parameters: Iterable[Tensor], limit: float) -> Tensor:
    """Scale the gradients so that their norm is at most `limit` (0: never). Returns the norm before."""
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    norm = get_total_norm([parameter.grad for parameter in trained if parameter.grad is not None])
    if limit > 0 and torch.isfinite(norm):
        clip_grads_with_norm_(trained, limit, norm)
    return norm
