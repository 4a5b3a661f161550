# pyright: basic, reportMissingImports=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""GELU and GEGLU as one Triton kernel each way. A program takes a piece of a row."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm_accelerate.kernels.grid import STEP, STEP_WARPS, rows_of


@triton.jit
def _share(x, TANH: tl.constexpr):
    """The share of a normal distribution below x, and its density there."""
    if TANH:
        bent = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        tail = tl.exp(-2 * tl.abs(bent))  # of the sigmoid that is 0.5 * (1 + tanh(bent)): it never overflows
        below = tl.where(bent < 0, tail, 1.0) / (1 + tail)
        density = 2 * tail / ((1 + tail) * (1 + tail)) * 0.7978845608028654 * (1 + 0.134145 * x * x)
    else:
        below = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return below, density


@triton.jit
def _forward(x, out, stride, width, TANH: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    here = x + row * stride + column
    bent = tl.load(here + (width if GATED else 0), mask=inside, other=0.0).to(tl.float32)
    below, _ = _share(bent, TANH)
    value = bent * below
    if GATED:
        value *= tl.load(here, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad, x, grad_x, grad_stride, stride, width,
    TANH: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    here = x + row * stride + column
    there = grad_x + row * (2 * width if GATED else width) + column
    along = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    bent = tl.load(here + (width if GATED else 0), mask=inside, other=0.0).to(tl.float32)
    below, density = _share(bent, TANH)
    if GATED:
        other = tl.load(here, mask=inside, other=0.0).to(tl.float32)
        tl.store(there, (along * bent * below).to(grad_x.dtype.element_ty), mask=inside)
        along *= other
        there += width
    tl.store(there, (along * (below + bent * density)).to(grad_x.dtype.element_ty), mask=inside)


class TritonGELU(torch.autograd.Function):
    """gelu(x); `gated`: first half * gelu(second half)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tanh: bool, gated: bool) -> Tensor:
        assert x.dtype != torch.float64  # computed in float32
        rows = rows_of(x)
        S, F = rows.shape[0], rows.shape[1] // 2 if gated else rows.shape[1]
        out = x.new_empty((*x.shape[:-1], F))
        if S:
            _forward[(S, triton.cdiv(F, STEP))](
                rows, out, rows.stride(0), F, TANH=tanh, GATED=gated, BLOCK=STEP, num_warps=STEP_WARPS
            )
        ctx.save_for_backward(x)
        ctx.tanh, ctx.gated = tanh, gated
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        rows, grad = rows_of(x), rows_of(grad_outputs[0])
        (S, F), grad_x = grad.shape, torch.empty_like(x, memory_format=torch.contiguous_format)
        if S:
            _backward[(S, triton.cdiv(F, STEP))](
                grad, rows, grad_x, grad.stride(0), rows.stride(0), F,
                TANH=ctx.tanh, GATED=ctx.gated, BLOCK=STEP, num_warps=STEP_WARPS,
            )  # fmt: skip
        return grad_x, None, None
