"""Root-mean-square norm; statistics and gradients are float32 whatever comes in."""

from typing import Any

import torch
from torch import Tensor


def rms_norm_reference(x_BTH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """The same by definition: x / rms(x) * weight, in x's dtype."""
    wide = x_BTH.float() if x_BTH.dtype in (torch.bfloat16, torch.float16) else x_BTH
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * scale * weight_H.to(wide.dtype)).to(x_BTH.dtype)


def rms_norm(x_BTH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """x / rms(x) * weight, in x's dtype. Keeps x and one number a row for the backward pass."""
    out: Any = _RMSNorm.apply(x_BTH, weight_H, epsilon)
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        out = x.to(wide, copy=True)
        scale = torch.linalg.vector_norm(out, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = scale.add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return out.mul_(scale).mul_(weight.to(wide)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        wide_x = x.to(scale.dtype)
        slope = slopes[0].to(scale.dtype, copy=True)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (slope * wide_x * scale).flatten(0, -2).sum(0).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        slope.mul_(weight.to(scale.dtype))
        along = (slope * wide_x).sum(-1, keepdim=True) * scale.pow(3) / -x.shape[-1]
        return slope.mul_(scale).addcmul_(wide_x, along).to(x.dtype), grad_weight, None
