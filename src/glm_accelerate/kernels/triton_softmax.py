# pyright: basic, reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
"""Masked softmax as one Triton kernel each way, a query to a program. Masks are computed from places, so that
none is read but that of padding; what a causal mask hides is not read either. Rows of any width, by pieces.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm_accelerate.kernels.grid import rows_of

PIECE = 4096  # numbers at once: most rows are one piece


@triton.jit
def _forward(
    scores, keys, out, stride, keys_stride, scale, queries, heads, width,
    CAUSAL: tl.constexpr, KEYS: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch = row // (queries * heads)
    end = width - queries + row % queries + 1 if CAUSAL else width  # the first key that is not seen
    top = float("-inf")
    total = 0.0
    for piece in range(PIECES):  # the largest score, and the sum as if it were known from the beginning
        column = piece * BLOCK + tl.arange(0, BLOCK)
        seen = column < end
        if KEYS:
            seen = seen & (tl.load(keys + batch * keys_stride + column, mask=seen, other=0) != 0)
        score = tl.load(scores + row * stride + column, mask=seen, other=float("-inf")).to(tl.float32) * scale
        score = tl.where(seen, score, float("-inf"))
        above = tl.maximum(top, tl.max(score, 0))
        safe = tl.where(above == float("-inf"), 0.0, above)
        total = total * tl.exp(top - safe) + tl.sum(tl.exp(score - safe), 0)
        top = above
    top = tl.where(top == float("-inf"), 0.0, top)
    inverse = tl.where(total > 0, 1 / tl.where(total > 0, total, 1.0), 0.0)
    for piece in range(PIECES):
        column = piece * BLOCK + tl.arange(0, BLOCK)
        seen = column < end
        if KEYS:
            seen = seen & (tl.load(keys + batch * keys_stride + column, mask=seen, other=0) != 0)
        score = tl.load(scores + row * stride + column, mask=seen, other=float("-inf")).to(tl.float32) * scale
        share = tl.where(seen, tl.exp(score - top) * inverse, 0.0)
        tl.store(out + row * width + column, share.to(out.dtype.element_ty), mask=column < width)


@triton.jit
def _backward(
    grad, out, grad_scores, grad_stride, scale, queries, width,
    CAUSAL: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    end = width - queries + row % queries + 1 if CAUSAL else width
    total = 0.0
    for piece in range(PIECES):
        column = piece * BLOCK + tl.arange(0, BLOCK)
        share = tl.load(out + row * width + column, mask=column < end, other=0.0).to(tl.float32)
        along = tl.load(grad + row * grad_stride + column, mask=column < end, other=0.0).to(tl.float32)
        total += tl.sum(share * along, 0)
    for piece in range(PIECES):
        column = piece * BLOCK + tl.arange(0, BLOCK)
        share = tl.load(out + row * width + column, mask=column < end, other=0.0).to(tl.float32)
        along = tl.load(grad + row * grad_stride + column, mask=column < end, other=0.0).to(tl.float32)
        value = share * (along - total) * scale
        tl.store(
            grad_scores + row * width + column, value.to(grad_scores.dtype.element_ty), mask=column < width
        )


def _pieces(width: int) -> dict[str, Any]:
    """A power of two of pieces, because Triton compiles a kernel for each number of them."""
    block = min(PIECE, max(16, triton.next_power_of_2(width)))
    pieces = triton.next_power_of_2(triton.cdiv(width, block))
    return {"PIECES": pieces, "BLOCK": block, "num_warps": min(8, max(1, block // 256))}


class TritonMaskedSoftmax(torch.autograd.Function):
    """A query that sees nothing gets zeros."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, scale: float, causal: bool, keys_BS: Tensor | None) -> Tensor:
        assert scores.dtype != torch.float64  # computed in float32
        rows, keys = rows_of(scores), None if keys_BS is None else keys_BS.to(torch.uint8).contiguous()
        (_, N, T, S), out = scores.shape, torch.empty_like(scores, memory_format=torch.contiguous_format)
        if scores.numel():
            _forward[(rows.shape[0],)](
                rows, keys, out, rows.stride(0), S, scale, T, N, S,
                CAUSAL=causal, KEYS=keys is not None, **_pieces(S),
            )  # fmt: skip
        ctx.save_for_backward(out)
        ctx.scale, ctx.causal = scale, causal
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (out,) = ctx.saved_tensors
        grad, (T, S) = rows_of(grad_outputs[0]), out.shape[-2:]
        grad_scores = torch.empty_like(out)
        if out.numel():
            _backward[(grad.shape[0],)](
                grad, out, grad_scores, grad.stride(0), ctx.scale, T, S, CAUSAL=ctx.causal, **_pieces(S)
            )
        return grad_scores, None, None, None
