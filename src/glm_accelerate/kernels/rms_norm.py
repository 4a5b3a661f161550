"""Root-mean-square norm, alone and with the residual sums around it; statistics and gradients are float32
whatever comes in. Four forms: PyTorch with an own backward pass, compiled loops, Triton, C++.

S rows, H width.
"""

from typing import Any

import torch
from torch import Tensor

from glm_accelerate.kernels.choose import Form
from glm_accelerate.kernels.compiled import run

LANES = 16  # numbers that native/norm.cpp processes at a time


def rms_norm_reference(x_BTH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """By definition: x / rms(x) * weight, in x's dtype."""
    wide = x_BTH.float() if x_BTH.dtype in (torch.bfloat16, torch.float16) else x_BTH
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * scale * weight_H.to(wide.dtype)).to(x_BTH.dtype)


def rms_norm(x_BTH: Tensor, weight_H: Tensor, epsilon: float, form: Form = "eager") -> Tensor:
    """x / rms(x) * weight, in x's dtype. Keeps x and one number a row for the backward pass."""
    return _norms(form, x_BTH, None, None, weight_H, epsilon)[0]


def add_norm(
    x_BTH: Tensor, branch_BTH: Tensor, weight_H: Tensor, epsilon: float, form: Form = "eager"
) -> Tensor:
    """x + norm(branch)."""
    return _norms(form, x_BTH, branch_BTH, weight_H, None, epsilon)[0]


def sum_norm(
    x_BTH: Tensor, branch_BTH: Tensor, weight_H: Tensor, epsilon: float, form: Form = "eager"
) -> tuple[Tensor, Tensor]:
    """y = x + branch and norm(y), between the two branches of an ordinary block."""
    y_BTH, normed_BTH = _norms(form, x_BTH, branch_BTH, None, weight_H, epsilon)
    return y_BTH, normed_BTH


def sandwich(
    x_BTH: Tensor, branch_BTH: Tensor, after_H: Tensor, before_H: Tensor, epsilon: float, form: Form = "eager"
) -> tuple[Tensor, Tensor]:
    """y = x + norm(branch) and norm(y), between the two branches of a GLM-4-0414 block."""
    y_BTH, normed_BTH = _norms(form, x_BTH, branch_BTH, after_H, before_H, epsilon)
    return y_BTH, normed_BTH


def _norms(
    form: Form, x: Tensor, branch: Tensor | None, after: Tensor | None, before: Tensor | None, epsilon: float
) -> tuple[Tensor, ...]:
    """y = x + norm(branch) * after, if there is a branch, and norm(y) * before, if there is `before`. Without
    `after` the branch is not normed; without a branch y is x.
    """
    if form == "triton":
        from glm_accelerate.kernels.triton_rms_norm import TritonNorms  # here: only some machines have Triton

        return TritonNorms.apply(x, branch, after, before, epsilon)
    if form == "native":
        assert x.dtype == torch.bfloat16
        assert x.shape[-1] % LANES == 0
        return _Native.apply(x, branch, after, before, epsilon)  # pyright: ignore[reportReturnType]
    if form == "compiled" and after is not None and before is not None:
        return _Sandwich.apply(x, branch, after, before, epsilon)  # pyright: ignore[reportReturnType]
    y: Any = x
    if branch is not None and after is None:
        y = x + branch
    elif branch is not None and form == "compiled":
        y = _Compiled.apply(x, branch, after, epsilon)
    elif branch is not None:
        normed: Any = _RMSNorm.apply(branch, after, epsilon)
        y = x + normed
    if before is None:
        return (y,)
    out: Any = (
        _Compiled.apply(None, y, before, epsilon)
        if form == "compiled"
        else _RMSNorm.apply(y, before, epsilon)
    )
    return (out,) if branch is None else (y, out)


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
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        wide_x = x.to(scale.dtype)
        grad = grad_outputs[0].to(scale.dtype, copy=True)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * wide_x * scale).flatten(0, -2).sum(0).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        grad.mul_(weight.to(scale.dtype))
        along = (grad * wide_x).sum(-1, keepdim=True) * scale.pow(3) / -x.shape[-1]
        return grad.mul_(scale).addcmul_(wide_x, along).to(x.dtype), grad_weight, None


class _Native(torch.autograd.Function):
    """Both norms and the sum in C++ (native/norm.cpp)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        after_H: Tensor | None,
        before_H: Tensor | None,
        epsilon: float,
    ) -> tuple[Tensor, ...]:
        wide = [None if weight is None else weight.detach().float() for weight in (after_H, before_H)]
        branch_SH = None if branch is None else branch.flatten(0, -2)
        ops = torch.ops.glm_accelerate
        y_SH, out_SH, first_S, second_S = ops.norms(x.flatten(0, -2), branch_SH, *wide, epsilon)
        ctx.save_for_backward(branch_SH if after_H is not None else None, y_SH, first_S, second_S, *wide)
        ctx.dtypes = [None if weight is None else weight.dtype for weight in (after_H, before_H)]
        ctx.shape, ctx.has_branch = x.shape, branch is not None
        sums = [] if branch is None else [y_SH.view(x.shape)]
        return (*sums, out_SH.view(x.shape)) if before_H is not None else tuple(sums)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        branch_SH, y_SH, first_S, second_S, after_H, before_H = ctx.saved_tensors
        rows = [grad.reshape(-1, ctx.shape[-1]).contiguous() for grad in grad_outputs]
        grad_y, grad_out = rows[0] if ctx.has_branch else None, None if before_H is None else rows[-1]
        wants = ctx.needs_input_grad[2:4]
        grad_x, grad_branch, grad_after, grad_before = torch.ops.glm_accelerate.norms_backward(
            grad_y, grad_out, y_SH, branch_SH, after_H, before_H, first_S, second_S, *wants
        )
        grad_x = grad_x.view(ctx.shape)
        grad_branch = grad_x if after_H is None else grad_branch.view(ctx.shape)
        sums = ((grad_after, wants[0], ctx.dtypes[0]), (grad_before, wants[1], ctx.dtypes[1]))
        grad_weights = (total.to(dtype) if wanted else None for total, wanted, dtype in sums)
        return grad_x, grad_branch if ctx.has_branch else None, *grad_weights, None


class _Compiled(torch.autograd.Function):
    """norm(branch), or x + norm(branch)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor | None, branch: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        rows = branch.flatten(0, -2)
        if x is None:
            out, scale = run(_norm, rows, weight, epsilon, lengths={0: (0,)})
        else:
            out, scale = run(_add, x.flatten(0, -2), rows, weight, epsilon, lengths={0: (0,), 1: (0,)})
        ctx.save_for_backward(branch, weight, scale)
        return out.view_as(branch)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        branch, weight, scale = ctx.saved_tensors
        rows, grad = branch.flatten(0, -2), grad_outputs[0].flatten(0, -2)
        lengths, wanted = {0: (0,), 1: (0,), 3: (0,)}, ctx.needs_input_grad[2]
        grad_branch, grad_weight = run(_norm_backward, grad, rows, weight, scale, wanted, lengths=lengths)
        grad_x = grad_outputs[0] if ctx.needs_input_grad[0] else None
        return grad_x, grad_branch.view_as(branch), grad_weight, None


class _Sandwich(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor, after: Tensor, before: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        rows = (x.flatten(0, -2), branch.flatten(0, -2))
        y, out, *scales = run(_sandwich, *rows, after, before, epsilon, lengths={0: (0,), 1: (0,)})
        ctx.save_for_backward(branch, y, after, before, *scales)
        return y.view_as(x), out.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        branch, y, after, before, *scales = ctx.saved_tensors
        rows = (*(grad.flatten(0, -2) for grad in grad_outputs), branch.flatten(0, -2), y)
        lengths = {0: (0,), 1: (0,), 2: (0,), 3: (0,), 6: (0,), 7: (0,)}
        wanted = ctx.needs_input_grad[2]
        grads = run(_sandwich_backward, *rows, after, before, *scales, wanted, lengths=lengths)
        grad_x, grad_branch, grad_after, grad_before = grads
        return grad_x.view_as(branch), grad_branch.view_as(branch), grad_after, grad_before, None


def _norm(x_SH: Tensor, weight_H: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    wide = x_SH.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * scale * weight_H.float()).to(x_SH.dtype), scale


def _add(x_SH: Tensor, branch_SH: Tensor, weight_H: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    out, scale = _norm(branch_SH.float(), weight_H, epsilon)
    return (x_SH.float() + out).to(x_SH.dtype), scale


def _sandwich(
    x_SH: Tensor, branch_SH: Tensor, after_H: Tensor, before_H: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, scale = _add(x_SH, branch_SH, after_H, epsilon)
    out, second = _norm(y, before_H, epsilon)
    return y, out, scale, second


def _norm_backward(
    grad_SH: Tensor, x_SH: Tensor, weight_H: Tensor, scale_S1: Tensor, wants_weight: bool
) -> tuple[Tensor, Tensor | None]:
    normed, grad = x_SH.float() * scale_S1, grad_SH.float()
    weighted = grad * weight_H.float()
    grad_x = (weighted - normed * (weighted * normed).mean(-1, keepdim=True)) * scale_S1
    return grad_x.to(x_SH.dtype), (grad * normed).sum(0).to(weight_H.dtype) if wants_weight else None


def _sandwich_backward(
    grad_y_SH: Tensor,
    grad_SH: Tensor,
    branch_SH: Tensor,
    y_SH: Tensor,
    after_H: Tensor,
    before_H: Tensor,
    scale_S1: Tensor,
    second_S1: Tensor,
    wants_weight: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    grad_normed, grad_before = _norm_backward(grad_SH, y_SH, before_H, second_S1, wants_weight)
    grad_x = (grad_y_SH.float() + grad_normed.float()).to(y_SH.dtype)
    grad_branch, grad_after = _norm_backward(grad_x, branch_SH, after_H, scale_S1, wants_weight)
    return grad_x, grad_branch, grad_after, grad_before
