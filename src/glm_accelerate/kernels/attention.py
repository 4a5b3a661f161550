"""Causal attention over packed rows: documents lie side by side and never see each other.

Letters: B rows, T tokens, S cached tokens or tokens in all, N query heads, K key/value heads, D head width,
H pairs of dimensions that turn, P prefix tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from glm_accelerate.kernels.choose import attention_dtype

QUERIES = 256  # that have one mask


def attention(
    q_BTND: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    lengths: Sequence[int] | None,
    prefix: tuple[Tensor, Tensor] | None = None,
    keys: Sequence[int] | None = None,
) -> Tensor:
    """Returns out_BTND. `lengths` tile the flattened rows (None: every row is one document), `keys` those of
    keys and values (None: the same): a document's own are the last of its keys, all before are seen by it.

    `prefix` is (keys, values), each of shape KPD, that stand before every document, seen by all of it.
    """
    groups = q_BTND.shape[2] // k_BTKD.shape[2]
    k_BTND, v_BTND = _repeat(k_BTKD, groups), _repeat(v_BTKD, groups)
    if lengths is None:
        return _one(q_BTND, k_BTND, v_BTND, prefix)
    q_1SND, k_1SND, v_1SND = (x.reshape(1, -1, *x.shape[2:]) for x in (q_BTND, k_BTND, v_BTND))
    seen = list(keys or lengths)
    parts = zip(q_1SND.split(list(lengths), 1), k_1SND.split(seen, 1), v_1SND.split(seen, 1), strict=True)
    return torch.cat([_one(q, k, v, prefix) for q, k, v in parts], dim=1).view(q_BTND.shape)


def _one(q_BTND: Tensor, k_BSND: Tensor, v_BSND: Tensor, prefix: tuple[Tensor, Tensor] | None) -> Tensor:
    """Rows that are one document each."""
    dtype = attention_dtype(q_BTND.device, q_BTND.dtype, k_BSND.shape[1])
    q_BNTD, k_BNSD, v_BNSD = (tensor.to(dtype).transpose(1, 2) for tensor in (q_BTND, k_BSND, v_BSND))
    B, N, T, _ = q_BNTD.shape
    if prefix is not None:
        before, values = (_before(tensor, B, N).to(dtype) for tensor in prefix)
        k_BNSD, v_BNSD = torch.cat((before, k_BNSD), 2), torch.cat((values, v_BNSD), 2)
    others = k_BNSD.shape[2] - T
    if not others:
        out = scaled_dot_product_attention(q_BNTD, k_BNSD, v_BNSD, is_causal=True)
    elif prefix is not None or T <= QUERIES:
        out = _behind(q_BNTD, k_BNSD, v_BNSD, others)
    else:  # masks are made again, one at a time
        blocks = [
            checkpoint(_behind, q, k_BNSD, v_BNSD, others + number * QUERIES, use_reentrant=False)
            for number, q in enumerate(q_BNTD.split(QUERIES, 2))
        ]
        out = torch.cat(blocks, 2)
    return out.transpose(1, 2).to(q_BTND.dtype)


def _behind(q_BNTD: Tensor, k_BNSD: Tensor, v_BNSD: Tensor, others: int) -> Tensor:
    """Queries whose own keys have so many others before them, seen by all."""
    T = q_BNTD.shape[2]
    k, v = k_BNSD[:, :, : others + T], v_BNSD[:, :, : others + T]
    mask_TS = torch.ones(T, others + T, dtype=torch.bool, device=q_BNTD.device).tril(others)
    return scaled_dot_product_attention(q_BNTD, k, v, attn_mask=mask_TS)


def attend_slots(q_B1ND: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, bias_BS: Tensor | None) -> Tensor:
    """One new token a row against a cache that lies head by head. The query heads that share a key head are
    treated as its queries, so no key is repeated; `bias` comes from `unseen`, once for all layers.
    """
    B, _, N, D = q_B1ND.shape
    q_BKGD = q_B1ND.reshape(B, k_BKSD.shape[1], -1, D)
    mask = None if bias_BS is None else bias_BS[:, None, None].expand(-1, 1, q_BKGD.shape[2], -1)
    out = scaled_dot_product_attention(q_BKGD, k_BKSD, v_BKSD, attn_mask=mask)
    return out.reshape(B, 1, N, D)


def unseen(lengths_B: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """bias_BS: 0 for the first lengths_B[b] tokens of row b, minus infinity for the rest."""
    beyond_BS = torch.arange(tokens, device=lengths_B.device) >= lengths_B[:, None]
    return torch.zeros(beyond_BS.shape, dtype=dtype, device=lengths_B.device).masked_fill_(
        beyond_BS, float("-inf")
    )


def _before(x_KPD: Tensor, B: int, N: int) -> Tensor:
    return x_KPD.repeat_interleave(N // x_KPD.shape[0], dim=0).expand(B, -1, -1, -1)


def _repeat(x_BTKD: Tensor, groups: int) -> Tensor:
    return x_BTKD if groups == 1 else x_BTKD.repeat_interleave(groups, dim=2)


def rotary_attention(
    q_SND: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    turns_SH2: Tensor,
    lengths: Sequence[int],
    keys: Sequence[int] | None = None,
) -> Tensor:
    """attention(rope(q), rope(k), v) of documents of `lengths`, heads side by side. All in bfloat16. Where
    documents see more `keys` than their own, there is nothing to turn (no H).

    One operator each way (native/attention.cpp) on a CPU with bfloat16 products: a document's scores stay in
    cache, and none are kept.
    """
    out: Any = _Attention.apply(q_SND, k_SKD, v_SKD, turns_SH2, list(lengths), list(keys or lengths))
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, turns: Tensor, lengths: list[int], keys: list[int]
    ) -> Tensor:
        out_SND, norm_SN = torch.ops.glm_accelerate.attention(q, k, v, turns, lengths, keys)
        ctx.save_for_backward(q, k, v, turns, out_SND, norm_SN)
        ctx.lengths, ctx.keys = lengths, keys
        return out_SND.flatten(1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        q, k, v, turns, out_SND, norm_SN = ctx.saved_tensors
        grad_SND = grad_outputs[0].reshape(out_SND.shape).contiguous()
        grads = torch.ops.glm_accelerate.attention_backward(
            grad_SND, q, k, v, turns, out_SND, norm_SN, ctx.lengths, ctx.keys
        )
        return (*grads, None, None, None)


def attention_reference(
    q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, lengths: Sequence[int] | None
) -> Tensor:
    """By definition: one dense mask, a softmax and two products. For tests."""
    B, T, N, D = q_BTND.shape
    tiles = [T] * B if lengths is None else list(lengths)
    document = torch.repeat_interleave(torch.arange(len(tiles)), torch.tensor(tiles)).view(B, T)
    seen_BTT = (document[:, :, None] == document[:, None, :]) & torch.ones(T, T, dtype=torch.bool).tril()
    k, v = (_repeat(tensor, N // tensor.shape[2]) for tensor in (k_BTKD, v_BTKD))
    scores = torch.einsum("btnd,bsnd->bnts", q_BTND, k) * D**-0.5
    scores = scores.masked_fill(~seen_BTT[:, None].to(scores.device), float("-inf"))
    return torch.einsum("bnts,bsnd->btnd", scores.softmax(-1), v)
