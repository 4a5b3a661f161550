"""Root-mean-square norm, alone and with the residual sums around it; statistics and gradients are float32
whatever comes in. Four forms: PyTorch with an own backward pass, compiled loops, Triton, C++.
"""

from typing import Any

import torch
from torch import Tensor

from glm_accelerate.kernels.choose import Form
from glm_accelerate.kernels.compiled import run


def rms_norm_reference(x_BTH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """The same by definition: x / rms(x) * weight, in x's dtype."""
    wide = x_BTH.float() if x_BTH.dtype in (torch.bfloat16, torch.float16) else x_BTH
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * scale * weight_H.to(wide.dtype)).to(x_BTH.dtype)


def rms_norm(x_BTH: Tensor, weight_H: Tensor, epsilon: float, form: Form = "eager") -> Tensor:
    """x / rms(x) * weight, in x's dtype. Keeps x and one number a row for the backward pass."""
    if form in ("triton", "native"):
        return _norms(form, x_BTH, None, None, weight_H, epsilon)[0]
    if form == "compiled":
        return _Compiled.apply(None, x_BTH, weight_H, epsilon)  # pyright: ignore[reportReturnType]
    out: Any = _RMSNorm.apply(x_BTH, weight_H, epsilon)
    return out


def add_norm(
    x_BTH: Tensor, branch_BTH: Tensor, weight_H: Tensor, epsilon: float, form: Form = "eager"
) -> Tensor:
    """x + norm(branch)."""
    if form in ("triton", "native"):
        return _norms(form, x_BTH, branch_BTH, weight_H, None, epsilon)[0]
    if form == "compiled":
        return _Compiled.apply(x_BTH, branch_BTH, weight_H, epsilon)  # pyright: ignore[reportReturnType]
    return x_BTH + rms_norm(branch_BTH, weight_H, epsilon)


def sum_norm(
    x_BTH: Tensor, branch_BTH: Tensor, weight_H: Tensor, epsilon: float, form: Form = "eager"
) -> tuple[Tensor, Tensor]:
    """y = x + branch and norm(y): what lies between the two branches of an ordinary block."""
    if form in ("triton", "native"):
        y_BTH, normed_BTH = _norms(form, x_BTH, branch_BTH, None, weight_H, epsilon)
        return y_BTH, normed_BTH
    y_BTH = x_BTH + branch_BTH
    return y_BTH, rms_norm(y_BTH, weight_H, epsilon, form)


def sandwich(
    x_BTH: Tensor, branch_BTH: Tensor, after_H: Tensor, before_H: Tensor, epsilon: float, form: Form = "eager"
) -> tuple[Tensor, Tensor]:
    """y = x + norm(branch) and norm(y): what lies between the two branches of a GLM-4-0414 block."""
    if form in ("triton", "native"):
        y_BTH, normed_BTH = _norms(form, x_BTH, branch_BTH, after_H, before_H, epsilon)
        return y_BTH, normed_BTH
    if form == "compiled":
        return _Sandwich.apply(x_BTH, branch_BTH, after_H, before_H, epsilon)  # pyright: ignore[reportReturnType]
    y_BTH = add_norm(x_BTH, branch_BTH, after_H, epsilon)
    return y_BTH, rms_norm(y_BTH, before_H, epsilon)


def _norms(
    form: Form, x: Tensor, branch: Tensor | None, after: Tensor | None, before: Tensor | None, epsilon: float
) -> tuple[Tensor, ...]:
    """Those of y = x + norm(branch) * after and norm(y) * before that are asked for, in one pass."""
    if form == "native":
        from glm_accelerate.kernels.native_rms_norm import norms
    else:
        from glm_accelerate.kernels.triton_rms_norm import norms  # here: only some machines have Triton
    return norms(x, branch, after, before, epsilon)


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
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor | None, ...]:
        branch, weight, scale = ctx.saved_tensors
        rows, slope = branch.flatten(0, -2), slopes[0].flatten(0, -2)
        lengths = {0: (0,), 1: (0,), 3: (0,)}
        made, by_weight = run(_back, slope, rows, weight, scale, ctx.needs_input_grad[2], lengths=lengths)
        return slopes[0] if ctx.needs_input_grad[0] else None, made.view_as(branch), by_weight, None


class _Sandwich(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor, after: Tensor, before: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        rows = (x.flatten(0, -2), branch.flatten(0, -2))
        y, out, *scales = run(_between, *rows, after, before, epsilon, lengths={0: (0,), 1: (0,)})
        ctx.save_for_backward(branch, y, after, before, *scales)
        return y.view_as(x), out.view_as(x)

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor | None, ...]:
        branch, y, after, before, *scales = ctx.saved_tensors
        rows = (*(slope.flatten(0, -2) for slope in slopes), branch.flatten(0, -2), y)
        lengths = {0: (0,), 1: (0,), 2: (0,), 3: (0,), 6: (0,), 7: (0,)}
        made = run(_between_back, *rows, after, before, *scales, ctx.needs_input_grad[2], lengths=lengths)
        made_x, made_branch, by_after, by_before = made
        return made_x.view_as(branch), made_branch.view_as(branch), by_after, by_before, None


def _norm(x_SH: Tensor, weight_H: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    wide = x_SH.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * scale * weight_H.float()).to(x_SH.dtype), scale


def _add(x_SH: Tensor, branch_SH: Tensor, weight_H: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    out, scale = _norm(branch_SH.float(), weight_H, epsilon)
    return (x_SH.float() + out).to(x_SH.dtype), scale


def _between(
    x_SH: Tensor, branch_SH: Tensor, after_H: Tensor, before_H: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, scale = _add(x_SH, branch_SH, after_H, epsilon)
    out, second = _norm(y, before_H, epsilon)
    return y, out, scale, second


def _back(
    slope_SH: Tensor, x_SH: Tensor, weight_H: Tensor, scale_S1: Tensor, by_weight: bool
) -> tuple[Tensor, Tensor | None]:
    wide, slope = x_SH.float() * scale_S1, slope_SH.float()
    turned = slope * weight_H.float()
    made = (turned - wide * (turned * wide).mean(-1, keepdim=True)) * scale_S1
    return made.to(x_SH.dtype), (slope * wide).sum(0).to(weight_H.dtype) if by_weight else None


def _between_back(
    slope_y_SH: Tensor,
    slope_SH: Tensor,
    branch_SH: Tensor,
    y_SH: Tensor,
    after_H: Tensor,
    before_H: Tensor,
    scale_S1: Tensor,
    second_S1: Tensor,
    by_weight: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    made, by_before = _back(slope_SH, y_SH, before_H, second_S1, by_weight)
    total = (slope_y_SH.float() + made.float()).to(y_SH.dtype)
    made_branch, by_after = _back(total, branch_SH, after_H, scale_S1, by_weight)
    return total, made_branch, by_after, by_before
