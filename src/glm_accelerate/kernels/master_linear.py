"""A linear layer whose float32 weight is multiplied in a narrower dtype, without fresh memory for its casts:
the narrow copy is made again only when the weight has changed, and the gradient goes straight to where it
is kept. On a CPU a cast into fresh memory takes four times as long as into memory touched before.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear


@dataclass(slots=True)
class Kept:
    """Of one weight: its narrow copy, the version of the weight that it copies, and room for a gradient."""

    narrow_OI: Tensor
    grad_OI: Tensor
    version: int = -1

    @staticmethod
    def of(weight_OI: Tensor, dtype: torch.dtype) -> "Kept":
        return Kept(torch.empty_like(weight_OI, dtype=dtype), torch.empty_like(weight_OI))

    def copy_of(self, weight_OI: Tensor) -> Tensor:
        """The weight in the narrow dtype."""
        if self.version != weight_OI._version:
            self.narrow_OI.copy_(weight_OI.detach())
            self.version = weight_OI._version
        return self.narrow_OI

    def add(self, weight_OI: Tensor, made_OI: Tensor) -> None:
        """Adds to the weight's gradient."""
        if weight_OI.grad is None:
            weight_OI.grad = self.grad_OI.copy_(made_OI)
        else:
            weight_OI.grad += made_OI


def master_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, kept: Kept) -> Tensor:
    """x @ weight.T + bias in x's dtype. The gradient of `weight`, a leaf, is left in `weight.grad`."""
    out: Any = _MasterLinear.apply(x, weight_OI, bias_O, kept)
    return out


class _MasterLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kept: Kept) -> Tensor:
        narrow = kept.copy_of(weight)
        ctx.save_for_backward(x, narrow)
        ctx.weight, ctx.kept = weight, kept
        return linear(x, narrow, bias)

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor | None, None, Tensor | None, None]:
        x, narrow = ctx.saved_tensors
        slope_SO = slopes[0].flatten(0, -2)
        ctx.kept.add(ctx.weight, slope_SO.T @ x.flatten(0, -2))
        grad_x = (slope_SO @ narrow).view_as(x) if ctx.needs_input_grad[0] else None
        return grad_x, None, slope_SO.sum(0) if ctx.needs_input_grad[2] else None, None
