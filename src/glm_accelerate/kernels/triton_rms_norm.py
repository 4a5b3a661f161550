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
    grad_y, grad_out, y, branch, after, before, first, second,
    grad_x, grad_branch, grad_after, grad_before,
    grad_y_stride, grad_out_stride, y_stride, branch_stride, rows, width,
    ADD: tl.constexpr, AFTER: tl.constexpr, BEFORE: tl.constexpr,
    GRAD_AFTER: tl.constexpr, GRAD_BEFORE: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
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
            total += tl.load(grad_y + row * grad_y_stride + column, mask=inside, other=0.0).to(tl.float32)
        if BEFORE:
            grad = tl.load(grad_out + row * grad_out_stride + column, mask=inside, other=0.0)
            grad = grad.to(tl.float32)
            scale = tl.load(second + row, mask=row < rows, other=0.0)
            wide = tl.load(y + row * y_stride + column, mask=inside, other=0.0).to(tl.float32) * scale
            if GRAD_BEFORE:
                sum_before += grad * wide
            grad *= tl.load(before + column, mask=inside, other=0.0).to(tl.float32)
            total += (grad - wide * (tl.sum(grad * wide, 0) / width)) * scale
            tl.store(grad_x + row * width + column, total.to(grad_x.dtype.element_ty), mask=inside)
        if AFTER:
            scale = tl.load(first + row, mask=row < rows, other=0.0)
            wide = tl.load(branch + row * branch_stride + column, mask=inside, other=0.0)
            wide = wide.to(tl.float32) * scale
            if GRAD_AFTER:
                sum_after += total * wide
            grad = total * tl.load(after + column, mask=inside, other=0.0).to(tl.float32)
            value = (grad - wide * (tl.sum(grad * wide, 0) / width)) * scale
            tl.store(grad_branch + row * width + column, value.to(grad_branch.dtype.element_ty), mask=inside)
    if GRAD_AFTER:
        tl.store(grad_after + program * width + column, sum_after, mask=column < width)
    if GRAD_BEFORE:
        tl.store(grad_before + program * width + column, sum_before, mask=column < width)


class TritonNorms(torch.autograd.Function):
    """Returns y if there is a branch, and out if there is `before`. Without a branch y is x."""

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
        return tuple(each for each in (y, out) if each is not None)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        y, branch, after, before, first, second = ctx.saved_tensors
        grad_y, grad_out = (
            grad_outputs[0] if ctx.adds else None,
            grad_outputs[-1] if before is not None else None,
        )
        rows = [None if each is None else rows_of(each) for each in (grad_y, grad_out, y, branch)]
        strides = [0 if each is None else each.stride(0) for each in rows]
        (S, H), shape = rows_of(grad_outputs[0]).shape, grad_outputs[0].shape
        grad_x = None if before is None else grad_outputs[0].new_empty(shape)
        grad_branch = None if after is None else grad_outputs[0].new_empty(shape)
        wants_after, wants_before = ctx.needs_input_grad[2], ctx.needs_input_grad[3]
        each = rows_each(S, grad_outputs[0].device) if wants_after or wants_before else 1
        programs = -(-S // each)
        grad_after = grad_outputs[0].new_empty((programs, H), dtype=torch.float32) if wants_after else None
        grad_before = grad_outputs[0].new_empty((programs, H), dtype=torch.float32) if wants_before else None
        block = block_of(H)
        if S:
            _backward[(programs,)](
                *rows, after, before, first, second,
                grad_x, grad_branch, grad_after, grad_before, *strides, S, H,
                ADD=ctx.adds, AFTER=after is not None, BEFORE=before is not None,
                GRAD_AFTER=wants_after, GRAD_BEFORE=wants_before, EACH=each,
                BLOCK=block, num_warps=warps_of(block),
            )  # fmt: skip
        grad_x = grad_y if grad_x is None else grad_x
        grad_branch = grad_x if ctx.adds and after is None else grad_branch
        sums = (
            None if each is None or weight is None else each.sum(0).to(weight.dtype)
            for each, weight in ((grad_after, after), (grad_before, before))
        )
        return grad_x, grad_branch, *sums, None
