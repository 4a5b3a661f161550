# pyright: basic, reportMissingImports=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Dropout whose mask is a function of a seed: it is drawn again where it is needed, and never kept.

An element is dropped if its 16 random bits are below the share; one Philox call draws eight of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUPS = 256  # of eight elements, 16 bytes of bfloat16 a thread, in a program
WORDS = 1 << 16


def dropped(x: Tensor, seed: int, share: float, into: Tensor | None = None) -> Tensor:
    """x with zeros where an element is dropped; what stays is not scaled up. `into`: adds to that instead."""
    assert x.is_contiguous()
    out = torch.empty_like(x) if into is None else into
    assert out.is_contiguous()
    programs = triton.cdiv(x.numel(), 8 * GROUPS)
    _drop[(programs,)](x, out, seed, round(share * WORDS), x.numel(), into is not None, GROUPS, num_warps=8)
    return out


@triton.jit
def _drop(x, out, seed, below, count, ADD: tl.constexpr, GROUPS: tl.constexpr):
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    one, two, three, four = tl.randint4x(seed, group)
    lane = tl.arange(0, 8)[None, :]
    low = tl.where(lane < 2, one[:, None], two[:, None])
    high = tl.where(lane < 6, three[:, None], four[:, None])
    bits = (tl.where(lane < 4, low, high) >> (16 * (lane % 2))) & 0xFFFF
    place = group.to(tl.int64)[:, None] * 8 + lane
    inside = place < count
    kept = tl.where(bits >= below, tl.load(x + place, mask=inside, other=0.0), 0.0)
    if ADD:
        kept = kept.to(tl.float32) + tl.load(out + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, kept.to(out.dtype.element_ty), mask=inside)
