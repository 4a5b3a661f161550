"""Rotary positions and causal attention of packed documents on a CPU with bfloat16 products, one operator
each way (native/attention.cpp): a document's scores stay in cache, and nothing of them is kept.
"""

# Letters: S tokens in all, N query heads, K key/value heads, D head width, H pairs of dimensions that turn.

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def rotary_attention(
    q_SND: Tensor, k_SKD: Tensor, v_SKD: Tensor, turns_SH2: Tensor, lengths: Sequence[int]
) -> Tensor:
    """attention(rope(q), rope(k), v) of documents of `lengths`, heads side by side. All in bfloat16."""
    out: Any = _Attention.apply(q_SND, k_SKD, v_SKD, turns_SH2, list(lengths))
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, turns: Tensor, lengths: list[int]) -> Tensor:
        out_SND, norm_SN = torch.ops.glm_accelerate.attention(q, k, v, turns, lengths)
        ctx.save_for_backward(q, k, v, turns, out_SND, norm_SN)
        ctx.lengths = lengths
        return out_SND.flatten(1)

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor | None, ...]:
        q, k, v, turns, out_SND, norm_SN = ctx.saved_tensors
        slope_SND = slopes[0].reshape(out_SND.shape).contiguous()
        made = torch.ops.glm_accelerate.attention_backward(
            slope_SND, q, k, v, turns, out_SND, norm_SN, ctx.lengths
        )
        return (*made, None, None)
