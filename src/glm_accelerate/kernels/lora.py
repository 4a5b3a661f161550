"""A frozen linear layer with a LoRA adapter: x W^T + b + scale * dropout(x) A^T B^T, without extra copies.

The product of the adapter is added into the layer's own output. Of its activations only x is kept, which its
neighbours keep too, and what the mask is drawn from. S rows, I inputs, O outputs, r rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from glm_accelerate.kernels.dropout import Keep, add_dropped, draw, drop
from glm_accelerate.kernels.product import product

LANES = 16  # inputs that native/lora.cpp takes at a time


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
    native: bool = False,
) -> Tensor:
    """`weight` and `bias` are frozen, in x's dtype; A and B may be wider, and so is their gradient."""
    scale = scale / (1 - dropout)
    if native and x.dtype == torch.bfloat16 and x.shape[-1] % LANES == 0 and A_rI.dtype == torch.float32:
        out: Any = _Native.apply(x, weight_OI, bias_O, A_rI, B_Or, dropout, scale)
    else:
        out = _LoraLinear.apply(x, weight_OI, bias_O, A_rI, B_Or, draw(x, dropout), scale)
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
        keep: Keep,
        scale: float,
    ) -> Tensor:
        out = linear(x, weight_OI, bias_O)
        _add(ctx, out, x, A_rI, B_Or, keep, scale, weight_OI)
        return out

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor | None, ...]:
        back, (weight_OI,) = _back(ctx, slopes[0], ctx.needs_input_grad[0])
        grad_x = None
        if back.through is not None:
            grad_x = slopes[0] @ weight_OI
            add_dropped(grad_x, back.through, back.keep)
        return grad_x, None, None, back.grad_A, back.grad_B, None, None


def add_adapter(
    out: Tensor, x: Tensor, A_rI: Tensor, B_Or: Tensor, *, scale: float, dropout: float = 0.0
) -> Tensor:
    """out += scale * dropout(x) A^T B^T, for a layer that multiplies in its own way."""
    added: Any = _Adapter.apply(out, x, A_rI, B_Or, draw(x, dropout), scale / (1 - dropout))
    return added


class _Adapter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, out: Tensor, x: Tensor, A_rI: Tensor, B_Or: Tensor, keep: Keep, scale: float
    ) -> Tensor:
        _add(ctx, out, x, A_rI, B_Or, keep, scale)
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor | None, ...]:
        back, _ = _back(ctx, slopes[0], ctx.needs_input_grad[1])
        grad_x = None if back.through is None else drop(back.through, back.keep)
        return slopes[0], grad_x, back.grad_A, back.grad_B, None, None


def _add(
    ctx: Any,
    out: Tensor,
    x: Tensor,
    A_rI: Tensor,
    B_Or: Tensor,
    keep: Keep,
    scale: float,
    *others: Tensor,
) -> None:
    """Adds the adapter's product into `out`, and keeps for the way back what it takes, with `others`."""
    down_Sr = drop(x, keep).flatten(0, -2) @ A_rI.to(x.dtype).T
    out.flatten(0, -2).addmm_(down_Sr, B_Or.to(x.dtype).T, alpha=scale)
    mask = keep if isinstance(keep, Tensor) else None
    ctx.save_for_backward(x, A_rI, B_Or, mask, down_Sr, *others)
    ctx.scale, ctx.keep = scale, None if mask is not None else keep


@dataclass(frozen=True, slots=True)
class _Back:
    """Gradients of an adapter. `through` is that of x if it is wanted, before `keep` drops of it."""

    grad_A: Tensor
    grad_B: Tensor
    through: Tensor | None
    keep: Keep


def _back(ctx: Any, slope: Tensor, wants_x: bool) -> tuple[_Back, list[Tensor]]:
    """From what `_add` kept; and the others that it kept."""
    x, A_rI, B_Or, mask, down_Sr, *others = ctx.saved_tensors
    keep: Keep = ctx.keep if mask is None else mask
    slope_SO = slope.flatten(0, -2)
    slope_Sr = (slope_SO @ B_Or.to(x.dtype)) * ctx.scale
    grad_A = (slope_Sr.T @ drop(x, keep).flatten(0, -2)).to(A_rI.dtype)
    grad_B = (slope_SO.T @ down_Sr).to(B_Or.dtype) * ctx.scale
    through = (slope_Sr @ A_rI.to(x.dtype)).view_as(x) if wants_x else None
    return _Back(grad_A, grad_B, through, keep), others


class _Native(torch.autograd.Function):
    """The same with the passes over x in C++, which draws the mask again on the way back."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        A_rI: Tensor,
        B_Or: Tensor,
        dropout: float,
        scale: float,
    ) -> Tensor:
        rows_SI = x.flatten(0, -2)
        seed = int(torch.randint(1 << 62, ())) if dropout else 0
        out_SO = product(rows_SI, weight_OI.T, bias_O, native=True)
        down_Sr = torch.ops.glm_accelerate.lora_down(rows_SI, A_rI.detach(), seed, dropout)
        out_SO.addmm_(down_Sr, B_Or.to(x.dtype).T, alpha=scale)
        ctx.save_for_backward(x, weight_OI, A_rI, B_Or, down_Sr)
        ctx.mask, ctx.scale = (seed, dropout), scale
        return out_SO.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor | None, ...]:
        x, weight_OI, A_rI, B_Or, down_Sr = ctx.saved_tensors
        slope_SO = slopes[0].flatten(0, -2)
        slope_Sr = (slope_SO @ B_Or.to(x.dtype)) * ctx.scale
        grad_B = (slope_SO.T @ down_Sr).to(B_Or.dtype) * ctx.scale
        grad_x = product(slope_SO, weight_OI, None, native=True)  # lora_back adds to it, wanted or not
        rows_SI = x.flatten(0, -2)
        grad_A = torch.ops.glm_accelerate.lora_back(grad_x, rows_SI, slope_Sr, A_rI.detach(), *ctx.mask)
        return grad_x.view_as(x), None, None, grad_A, grad_B, None, None
