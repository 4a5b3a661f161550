# pyright: basic, reportMissingImports=false, reportCallIssue=false
"""Rotary positions as one Triton kernel: heads of any stride in, so that queries and keys need no copy when
they lie in one matrix. The backward pass is the same kernel, turning the other way.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 8  # of one token, to a program


@triton.jit
def _turn(
    x, turns, out, token_stride, head_stride, heads, width, pairs, sign,
    HALVES: tl.constexpr, N: tl.constexpr, R: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """`sign` -1 turns back."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * N + tl.arange(0, N)[:, None]
    source = x + token * token_stride + head * head_stride
    target = out + (token * heads + head) * width
    if HALVES:
        pair = tl.arange(0, R)[None, :]
        inside = (head < heads) & (pair < pairs)
        table = turns + (token * pairs + pair) * 2
        cos = tl.load(table, mask=pair < pairs, other=0.0)
        sin = tl.load(table + 1, mask=pair < pairs, other=0.0) * sign
        one = tl.load(source + pair, mask=inside, other=0.0).to(tl.float32)
        two = tl.load(source + pair + pairs, mask=inside, other=0.0).to(tl.float32)
        tl.store(target + pair, (one * cos - two * sin).to(out.dtype.element_ty), mask=inside)
        tl.store(target + pair + pairs, (two * cos + one * sin).to(out.dtype.element_ty), mask=inside)
    else:
        place = tl.arange(0, 2 * R)[None, :]  # neighbours are read together and parted in registers
        inside = (head < heads) & (place < 2 * pairs)
        table = tl.load(turns + token * 2 * pairs + place, mask=place < 2 * pairs, other=0.0)
        cos, sin = tl.split(tl.reshape(table, (1, R, 2)))
        sin *= sign
        both = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
        one, two = tl.split(tl.reshape(both, (N, R, 2)))
        value = tl.reshape(tl.join(one * cos - two * sin, two * cos + one * sin), (N, 2 * R))
        tl.store(target + place, value.to(out.dtype.element_ty), mask=inside)
    if REST:
        place = 2 * pairs + tl.arange(0, REST)[None, :]
        inside = (head < heads) & (place < width)
        tl.store(target + place, tl.load(source + place, mask=inside, other=0.0), mask=inside)


def _launch(x_BTND: Tensor, turns_SR2: Tensor, halves: bool, sign: float) -> Tensor:
    assert x_BTND.dtype != torch.float64  # computed in float32
    x_SND = x_BTND.flatten(0, 1)
    x_SND = x_SND if x_SND.stride(-1) == 1 else x_SND.contiguous()
    (S, N, D), R = x_SND.shape, turns_SR2.shape[1]
    out = torch.empty_like(x_BTND, memory_format=torch.contiguous_format)
    if not x_BTND.numel():
        return out
    rest, many = D - 2 * R, min(HEADS, triton.next_power_of_2(N))
    _turn[(S, triton.cdiv(N, many))](
        x_SND, turns_SR2, out, x_SND.stride(0), x_SND.stride(1), N, D, R, sign,
        HALVES=halves, N=many, R=triton.next_power_of_2(R),
        REST=triton.next_power_of_2(rest) if rest else 0, num_warps=4,
    )  # fmt: skip
    return out


class TritonRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, turns: Tensor, halves: bool) -> Tensor:
        ctx.save_for_backward(turns)
        ctx.halves = halves
        return _launch(x, turns, halves, 1.0)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (turns,) = ctx.saved_tensors
        return _launch(grad_outputs[0], turns, ctx.halves, -1.0), None, None
