"""Linear layers, x W^T + b, alone or frozen with a LoRA adapter. S rows, I inputs, O outputs, r rank."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from glm_accelerate.kernels.dropout import Keep, add_dropped, draw, drop

LANES = 16  # inputs that native/lora.cpp processes at a time


def product(a: Tensor, b: Tensor, bias: Tensor | None, native: bool) -> Tensor:
    """a b + bias of two matrices, without a gradient. `native`: narrow bfloat16 products on CPUs, which torch
    computes on one thread, are divided over all (native/product.cpp).
    """
    if native and a.dtype == torch.bfloat16:
        return torch.ops.glm_accelerate.product(a, b, bias)
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


def linear(
    x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, native: bool = False, copy_OI: Tensor | None = None
) -> Tensor:
    """x W^T + b in x's dtype, whatever dtype the weights have. `copy`: the weight in x's dtype, if kept;
    the gradient is still the weight's, in its `grad_dtype`.
    """
    if native and x.dtype == torch.bfloat16:
        out: Any = _Linear.apply(x, weight_OI, bias_O, copy_OI)
        return out
    return torch_linear(x, weight_OI.to(x.dtype), None if bias_O is None else bias_O.to(x.dtype))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, copy_OI: Tensor | None
    ) -> Tensor:
        weight = weight_OI.to(x.dtype) if copy_OI is None else copy_OI
        bias = None if bias_O is None else bias_O.to(x.dtype)
        ctx.save_for_backward(x if weight_OI.requires_grad else None, weight)
        ctx.dtypes = (
            weight_OI.grad_dtype if weight_OI.is_leaf else weight_OI.dtype,
            None if bias_O is None else bias_O.dtype,
        )
        return product(x.flatten(0, -2), weight.T, bias, native=True).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_SO, lead = grad_outputs[0].flatten(0, -2), grad_outputs[0].shape[:-1]
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = product(grad_SO, weight, None, native=True).view(*lead, weight.shape[1])
        if ctx.needs_input_grad[1]:
            grad_weight = product(grad_SO.T, x.flatten(0, -2), None, native=True).to(ctx.dtypes[0])
        if ctx.needs_input_grad[2]:
            grad_bias = grad_SO.sum(0).to(ctx.dtypes[1])
        return grad_x, grad_weight, grad_bias, None


def lora_linear_reference(
    x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, A_rI: Tensor, B_Or: Tensor, scale: float
) -> Tensor:
    """By definition, without dropout."""
    plain = torch_linear(x, weight_OI, bias_O)
    return plain + scale * torch_linear(torch_linear(x, A_rI.to(x.dtype)), B_Or.to(x.dtype))


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
    """x W^T + b + scale * dropout(x) A^T B^T. The adapter's product is added into the layer's output. Only
    x, which its neighbours keep too, and the mask or its seed are kept.

    `weight` and `bias` are frozen, in x's dtype; A and B may be wider, and so is their gradient.
    """
    scale = scale / (1 - dropout)
    if native and x.dtype == torch.bfloat16 and x.shape[-1] % LANES == 0 and A_rI.dtype == torch.float32:
        out: Any = _NativeLora.apply(x, weight_OI, bias_O, A_rI, B_Or, dropout, scale)
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
        out = torch_linear(x, weight_OI, bias_O)
        _add(ctx, out, x, A_rI, B_Or, keep, scale, weight_OI)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        grad_A, grad_B, dropped, keep, weight_OI = _backward(ctx, grad_outputs[0], ctx.needs_input_grad[0])
        grad_x = None
        if dropped is not None:
            grad_x = grad_outputs[0] @ weight_OI
            add_dropped(grad_x, dropped, keep)
        return grad_x, None, None, grad_A, grad_B, None, None


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
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        grad_A, grad_B, dropped, keep, _ = _backward(ctx, grad_outputs[0], ctx.needs_input_grad[1])
        grad_x = None if dropped is None else drop(dropped, keep)
        return grad_outputs[0], grad_x, grad_A, grad_B, None, None


def _add(
    ctx: Any,
    out: Tensor,
    x: Tensor,
    A_rI: Tensor,
    B_Or: Tensor,
    keep: Keep,
    scale: float,
    weight_OI: Tensor | None = None,
) -> None:
    """Adds the adapter's product into `out`, and keeps what `_backward` needs, with the frozen weight."""
    down_Sr = drop(x, keep).flatten(0, -2) @ A_rI.to(x.dtype).T
    out.flatten(0, -2).addmm_(down_Sr, B_Or.to(x.dtype).T, alpha=scale)
    mask = keep if isinstance(keep, Tensor) else None
    ctx.save_for_backward(x, A_rI, B_Or, mask, down_Sr, weight_OI)
    ctx.scale, ctx.keep = scale, None if mask is not None else keep


def _backward(
    ctx: Any, grad: Tensor, wants_x: bool
) -> tuple[Tensor, Tensor, Tensor | None, Keep, Tensor | None]:
    """Gradients of A, of B and, if x's is wanted, of dropout(x); the mask; and the frozen weight."""
    x, A_rI, B_Or, mask, down_Sr, weight_OI = ctx.saved_tensors
    keep: Keep = ctx.keep if mask is None else mask
    grad_SO = grad.flatten(0, -2)
    grad_Sr = (grad_SO @ B_Or.to(x.dtype)) * ctx.scale
    grad_A = (grad_Sr.T @ drop(x, keep).flatten(0, -2)).to(A_rI.dtype)
    grad_B = (grad_SO.T @ down_Sr).to(B_Or.dtype) * ctx.scale
    dropped = (grad_Sr @ A_rI.to(x.dtype)).view_as(x) if wants_x else None
    return grad_A, grad_B, dropped, keep, weight_OI


class _NativeLora(torch.autograd.Function):
    """Passes over x in C++, which draws the mask again in the backward pass."""

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
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        x, weight_OI, A_rI, B_Or, down_Sr = ctx.saved_tensors
        grad_SO = grad_outputs[0].flatten(0, -2)
        grad_Sr = (grad_SO @ B_Or.to(x.dtype)) * ctx.scale
        grad_B = (grad_SO.T @ down_Sr).to(B_Or.dtype) * ctx.scale
        grad_x = product(grad_SO, weight_OI, None, native=True)  # lora_backward adds to it, wanted or not
        rows_SI = x.flatten(0, -2)
        grad_A = torch.ops.glm_accelerate.lora_backward(grad_x, rows_SI, grad_Sr, A_rI.detach(), *ctx.mask)
        return grad_x.view_as(x), None, None, grad_A, grad_B, None, None
