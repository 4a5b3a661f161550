# pyright: basic, reportMissingImports=false, reportCallIssue=false
"""Root-mean-square norms and the sums around them as two Triton kernels. Any part may be left out:

    y = x + norm(branch) * after        out = norm(y) * before

One pass over memory each way; a weight's gradient is summed in two stages, in a fixed order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm_accelerate.kernels.grid import block_of, rows_each, rows_of, warps_of


def norms(
    x: Tensor, branch: Tensor | None, after_H: Tensor | None, before_H: Tensor | None, epsilon: float
) -> tuple[Tensor, ...]:
    """Those of (y, out) that are asked for: y with a branch, out with `before`. Without a branch y is x."""
    return _Norms.apply(x, branch, after_H, before_H, epsilon)


@triton.jit
def _forward(
    x, branch, after, before, y, out, first, second,
    x_stride, branch_stride, width, epsilon,
    ADD: tl.constexpr, AFTER: tl.constexpr, BEFORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    total = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        added = tl.load(branch + row * branch_stride + column, mask=inside, other=0.0).to(tl.float32)
        if AFTER:
            scale = tl.rsqrt(tl.sum(added * added, 0) / width + epsilon)
            tl.store(first + row, scale)
            added *= scale * tl.load(after + column, mask=inside, other=0.0).to(tl.float32)
        rounded = (total + added).to(y.dtype.element_ty)
        tl.store(y + row * width + column, rounded, mask=inside)
        total = rounded.to(tl.float32)  # what the backward pass will read
    if BEFORE:
        scale = tl.rsqrt(tl.sum(total * total, 0) / width + epsilon)
        tl.store(second + row, scale)
        total *= scale * tl.load(before + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    slope_y, slope_out, y, branch, after, before, first, second,
    made_y, made_branch, by_after, by_before,
    slope_y_stride, slope_out_stride, y_stride, branch_stride, rows, width,
    ADD: tl.constexpr, AFTER: tl.constexpr, BEFORE: tl.constexpr,
    BY_AFTER: tl.constexpr, BY_BEFORE: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    sum_after = tl.zeros((BLOCK,), tl.float32)
    sum_before = tl.zeros((BLOCK,), tl.float32)
    for number in range(EACH):
        row = program.to(tl.int64) * EACH + number
        inside = (column < width) & (row < rows)
        total = tl.zeros((BLOCK,), tl.float32)
        if ADD:
            total += tl.load(slope_y + row * slope_y_stride + column, mask=inside, other=0.0).to(tl.float32)
        if BEFORE:
            slope = tl.load(slope_out + row * slope_out_stride + column, mask=inside, other=0.0)
            slope = slope.to(tl.float32)
            scale = tl.load(second + row, mask=row < rows, other=0.0)
            wide = tl.load(y + row * y_stride + column, mask=inside, other=0.0).to(tl.float32) * scale
            if BY_BEFORE:
                sum_before += slope * wide
            slope *= tl.load(before + column, mask=inside, other=0.0).to(tl.float32)
            total += (slope - wide * (tl.sum(slope * wide, 0) / width)) * scale
            tl.store(made_y + row * width + column, total.to(made_y.dtype.element_ty), mask=inside)
        if AFTER:
            scale = tl.load(first + row, mask=row < rows, other=0.0)
            wide = tl.load(branch + row * branch_stride + column, mask=inside, other=0.0)
            wide = wide.to(tl.float32) * scale
            if BY_AFTER:
                sum_after += total * wide
            slope = total * tl.load(after + column, mask=inside, other=0.0).to(tl.float32)
            made = (slope - wide * (tl.sum(slope * wide, 0) / width)) * scale
            tl.store(made_branch + row * width + column, made.to(made_branch.dtype.element_ty), mask=inside)
    if BY_AFTER:
        tl.store(by_after + program * width + column, sum_after, mask=column < width)
    if BY_BEFORE:
        tl.store(by_before + program * width + column, sum_before, mask=column < width)


class _Norms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        after: Tensor | None,
        before: Tensor | None,
        epsilon: float,
    ) -> tuple[Tensor, ...]:
        assert x.dtype != torch.float64  # sums are float32
        assert branch is None or (branch.shape == x.shape and branch.dtype == x.dtype)
        x_SH, branch_SH = rows_of(x), None if branch is None else rows_of(branch)
        S, H = x_SH.shape
        y = None if branch is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        out = None if before is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        first = None if after is None else x.new_empty(S, dtype=torch.float32)
        second = None if before is None else x.new_empty(S, dtype=torch.float32)
        block = block_of(H)
        if S:
            _forward[(S,)](
                x_SH, branch_SH, after, before, y, out, first, second,
                x_SH.stride(0), 0 if branch_SH is None else branch_SH.stride(0), H, epsilon,
                ADD=branch is not None, AFTER=after is not None, BEFORE=before is not None,
                BLOCK=block, num_warps=warps_of(block),
            )  # fmt: skip
        normed = x if y is None else y
        kept = normed if before is not None else None  # what a norm read, and nothing that none did
        ctx.save_for_backward(kept, branch if after is not None else None, after, before, first, second)
        ctx.adds = branch is not None
        return tuple(made for made in (y, out) if made is not None)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        y, branch, after, before, first, second = ctx.saved_tensors
        slope_y, slope_out = slopes[0] if ctx.adds else None, slopes[-1] if before is not None else None
        rows = [None if each is None else rows_of(each) for each in (slope_y, slope_out, y, branch)]
        strides = [0 if each is None else each.stride(0) for each in rows]
        (S, H), shape = rows_of(slopes[0]).shape, slopes[0].shape
        made_y = None if before is None else slopes[0].new_empty(shape)
        made_branch = None if after is None else slopes[0].new_empty(shape)
        wants_after, wants_before = ctx.needs_input_grad[2], ctx.needs_input_grad[3]
        each = rows_each(S, slopes[0].device) if wants_after or wants_before else 1
        programs = -(-S // each)
        by_after = slopes[0].new_empty((programs, H), dtype=torch.float32) if wants_after else None
        by_before = slopes[0].new_empty((programs, H), dtype=torch.float32) if wants_before else None
        block = block_of(H)
        if S:
            _backward[(programs,)](
                *rows, after, before, first, second, made_y, made_branch, by_after, by_before, *strides, S, H,
                ADD=ctx.adds, AFTER=after is not None, BEFORE=before is not None,
                BY_AFTER=wants_after, BY_BEFORE=wants_before, EACH=each,
                BLOCK=block, num_warps=warps_of(block),
            )  # fmt: skip
        made_x = slope_y if made_y is None else made_y
        made_branch = made_x if ctx.adds and after is None else made_branch
        sums = (
            None if each is None or weight is None else each.sum(0).to(weight.dtype)
            for each, weight in ((by_after, after), (by_before, before))
        )
        return made_x, made_branch, *sums, None
