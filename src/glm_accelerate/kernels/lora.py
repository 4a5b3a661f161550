"""A frozen linear layer with a LoRA adapter: x W^T + b + scale * dropout(x) A^T B^T, without extra copies.

The product of the adapter is added into the layer's own output, and of its activations only x, which its
neighbours keep too, and the mask are kept. S rows, I inputs, O outputs, r rank.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from glm_accelerate.kernels.dropout import keep_mask


def lora_linear_reference(
    x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, A_rI: Tensor, B_Or: Tensor, scale: float
) -> Tensor:
    """The same by definition, without dropout."""
    plain = linear(x, weight_OI, bias_O)
    return plain + scale * linear(linear(x, A_rI.to(x.dtype)), B_Or.to(x.dtype))


def lora_linear(
    x: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    A_rI: Tensor,
    B_Or: Tensor,
    *,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """`weight` and `bias` are frozen, in x's dtype; A and B may be wider, and so is their gradient."""
    keep = keep_mask(x, dropout) if dropout else None
    out: Any = _LoraLinear.apply(x, weight_OI, bias_O, A_rI, B_Or, keep, scale / (1 - dropout))
    return out


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        A_rI: Tensor,
        B_Or: Tensor,
        keep: Tensor | None,
        scale: float,
    ) -> Tensor:
        out = linear(x, weight_OI, bias_O)
        seen = x if keep is None else x * keep
        down_Sr = seen.flatten(0, -2) @ A_rI.to(x.dtype).T
        out.flatten(0, -2).addmm_(down_Sr, B_Or.to(x.dtype).T, alpha=scale)
        ctx.save_for_backward(x, weight_OI, A_rI, B_Or, keep, down_Sr)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor | None, ...]:
        x, weight_OI, A_rI, B_Or, keep, down_Sr = ctx.saved_tensors
        slope_SO = slopes[0].flatten(0, -2)
        slope_Sr = (slope_SO @ B_Or.to(x.dtype)) * ctx.scale
        seen = x if keep is None else x * keep
        grad_A = (slope_Sr.T @ seen.flatten(0, -2)).to(A_rI.dtype)
        grad_B = (slope_SO.T @ down_Sr).to(B_Or.dtype) * ctx.scale
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (slope_SO @ weight_OI).view_as(x)
            through = (slope_Sr @ A_rI.to(x.dtype)).view_as(x)
            grad_x += through if keep is None else through.mul_(keep)
        return grad_x, None, None, grad_A, grad_B, None, None
