# pyright: basic, reportMissingImports=false, reportCallIssue=false
"""norm(alpha * x + dropout(branch)) as one Triton kernel each way. The mask of the dropout is drawn again
from its seed in the backward pass, and the sum is computed again from x and branch: neither is kept.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm_accelerate.kernels.grid import block_of, rows_each, rows_of, warps_of


@triton.jit
def _kept(seed, row, column, width, dropout):
    """What the branch is multiplied by: 0, or 1 / (1 - dropout)."""
    return tl.where(tl.rand(seed, row * width + column) >= dropout, 1 / (1 - dropout), 0.0)


@triton.jit
def _forward(
    x, branch, weight, bias, out, mean, scale, x_stride, branch_stride, width, epsilon, alpha, dropout, seed,
    ADD: tl.constexpr, DROP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    total = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        added = tl.load(branch + row * branch_stride + column, mask=inside, other=0.0).to(tl.float32)
        if DROP:
            added *= _kept(seed, row, column, width, dropout)
        total = total * alpha + added
    middle = tl.sum(total, 0) / width
    centred = tl.where(inside, total - middle, 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, 0) / width + epsilon)
    tl.store(mean + row, middle)
    tl.store(scale + row, inverse)
    value = centred * inverse * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad, x, branch, weight, mean, scale, grad_x, grad_branch, grad_weight, grad_bias,
    grad_stride, x_stride, branch_stride, rows, width, alpha, dropout, seed,
    ADD: tl.constexpr, DROP: tl.constexpr, SUMS: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    sum_weight = tl.zeros((BLOCK,), tl.float32)
    sum_bias = tl.zeros((BLOCK,), tl.float32)
    for number in range(EACH):
        row = program.to(tl.int64) * EACH + number
        inside = (column < width) & (row < rows)
        total = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        keep = 1.0
        if ADD:
            added = tl.load(branch + row * branch_stride + column, mask=inside, other=0.0).to(tl.float32)
            if DROP:
                keep = _kept(seed, row, column, width, dropout)
            total = total * alpha + added * keep
        inverse = tl.load(scale + row, mask=row < rows, other=0.0)
        normed = (total - tl.load(mean + row, mask=row < rows, other=0.0)) * inverse
        along = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        if SUMS:
            sum_weight += along * normed
            sum_bias += along
        along *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        along = tl.where(inside, along - tl.sum(along, 0) / width, 0.0)
        value = (along - normed * (tl.sum(along * normed, 0) / width)) * inverse
        if ADD:
            tl.store(
                grad_branch + row * width + column,
                (value * keep).to(grad_branch.dtype.element_ty),
                mask=inside,
            )
            value *= alpha
        tl.store(grad_x + row * width + column, value.to(grad_x.dtype.element_ty), mask=inside)
    if SUMS:
        tl.store(grad_weight + program * width + column, sum_weight, mask=column < width)
        tl.store(grad_bias + program * width + column, sum_bias, mask=column < width)


class TritonDeepNorm(torch.autograd.Function):
    """Without a branch: norm(x)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor,
        epsilon: float, alpha: float, dropout: float,
    ) -> Tensor:  # fmt: skip
        assert x.dtype != torch.float64  # sums are float32
        assert branch is None or (branch.shape == x.shape and branch.dtype == x.dtype)
        rows = [None if each is None else rows_of(each) for each in (x, branch)]
        strides = [0 if each is None else each.stride(0) for each in rows]
        H = x.shape[-1]
        S = x.numel() // H
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        mean, scale = (x.new_empty(S, dtype=torch.float32) for _ in range(2))
        # From the CPU's generator: nothing waits for the device, and a recomputed block draws the same.
        seed = int(torch.randint(1 << 31, ())) if dropout else 0
        block = block_of(H)
        if S:
            _forward[(S,)](
                *rows, weight, bias, out, mean, scale, *strides, H, epsilon, alpha, dropout, seed,
                ADD=branch is not None, DROP=dropout > 0, BLOCK=block, num_warps=warps_of(block),
            )  # fmt: skip
        ctx.save_for_backward(x, branch, weight, mean, scale)
        ctx.drawn = (alpha, dropout, seed)
        ctx.bias_dtype = bias.dtype
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, branch, weight, mean, scale = ctx.saved_tensors
        rows = [None if each is None else rows_of(each) for each in (grad_outputs[0], x, branch)]
        strides = [0 if each is None else each.stride(0) for each in rows]
        H = x.shape[-1]
        S = x.numel() // H
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        grad_branch = None if branch is None else torch.empty_like(grad_x)
        trained = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        each = rows_each(S, x.device) if trained else 1
        programs = -(-S // each)
        sums = [x.new_empty((programs, H), dtype=torch.float32) if trained else None for _ in range(2)]
        block = block_of(H)
        if S:
            _backward[(programs,)](
                *rows, weight, mean, scale, grad_x, grad_branch, *sums, *strides, S, H, *ctx.drawn,
                ADD=branch is not None, DROP=ctx.drawn[1] > 0, SUMS=trained, EACH=each,
                BLOCK=block, num_warps=warps_of(block),
            )  # fmt: skip
        dtypes = (weight.dtype, ctx.bias_dtype)
        totals = (
            None if each is None else each.sum(0).to(dtype) for each, dtype in zip(sums, dtypes, strict=True)
        )
        return grad_x, grad_branch, *totals, None, None, None
