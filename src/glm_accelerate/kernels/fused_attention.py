"""Rotary positions and causal attention of packed documents on a CPU: products in bfloat16, all between
them compiled. A tile is a stretch of a document's queries and the keys that they may see.

Letters: S tokens in all, K key/value heads, G query heads for each, N = K * G, D head width, R rotated
pairs; of a tile: Q rows (a query in a head of the group), T keys.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from glm_accelerate.kernels.compiled import run

BLOCK = 256  # queries of a tile: smaller skips more of the unseen half, larger has fewer products


def rotary_attention(
    q_SND: Tensor, k_SKD: Tensor, v_SKD: Tensor, turns_SR2: Tensor, lengths: Sequence[int]
) -> Tensor:
    """attention(rope(q), rope(k), v) for documents of `lengths`, side by side as the heads of out_SH are."""
    out: Any = _Attention.apply(q_SND, k_SKD, v_SKD, turns_SR2, tuple(tiles(lengths)))
    return out


def tiles(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(where the document begins, first query, end of queries and keys) of every tile."""
    begin = 0
    for length in lengths:
        for first in range(begin, begin + length, BLOCK):
            yield begin, first, min(first + BLOCK, begin + length)
        begin += length


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, turns: Tensor, spans: tuple[tuple[int, int, int], ...]
    ) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        q_KSGD, k_KSD, v_KSD = run(_lay, q, k, v, turns, lengths={0: (0,), 1: (0,), 2: (0,), 3: (0,)})
        out_KSGD = torch.empty_like(q_KSGD)
        total_KSG = q_KSGD.new_empty(q_KSGD.shape[:-1], dtype=torch.float32)
        norms: list[Tensor] = []
        for begin, first, end in spans:
            q_KQD = q_KSGD[:, first:end].flatten(1, 2)
            scores_KQT = torch.bmm(q_KQD, k_KSD[:, begin:end].transpose(1, 2))
            powers_KQT, total_KQ, norm_KQ = run(
                _powers,
                scores_KQT,
                *_marks(k.shape[1], groups, begin, first, end),
                q.shape[-1] ** -0.5,
                lengths={0: (1, 2), 1: (0,), 2: (0,)},
            )
            torch.bmm(powers_KQT, v_KSD[:, begin:end], out=out_KSGD[:, first:end].flatten(1, 2))
            total_KSG[:, first:end] = total_KQ.unflatten(1, (-1, groups))
            norms.append(norm_KQ)
        ctx.save_for_backward(q_KSGD, k_KSD, v_KSD, turns, *norms)
        ctx.spans = spans
        return run(_divide, out_KSGD, total_KSG, lengths={0: (1,), 1: (1,)})

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor | None, ...]:
        q_KSGD, k_KSD, v_KSD, turns, *norms = ctx.saved_tensors
        K, S, G, D = q_KSGD.shape
        slope_KSGD = slopes[0].reshape(S, K, G, D).transpose(0, 1).contiguous()
        dq_KSGD, dk_KSD, dv_KSD = torch.empty_like(q_KSGD), torch.zeros_like(k_KSD), torch.zeros_like(v_KSD)
        for (begin, first, end), norm_KQ in zip(ctx.spans, norms, strict=True):
            q_KQD, slope_KQD = q_KSGD[:, first:end].flatten(1, 2), slope_KSGD[:, first:end].flatten(1, 2)
            k_KTD, v_KTD = k_KSD[:, begin:end], v_KSD[:, begin:end]
            scores_KQT = torch.bmm(q_KQD, k_KTD.transpose(1, 2))
            dp_KQT = torch.bmm(slope_KQD, v_KTD.transpose(1, 2))
            p_KQT, ds_KQT = run(
                _slope,
                scores_KQT,
                dp_KQT,
                norm_KQ,
                *_marks(K, G, begin, first, end),
                D**-0.5,
                lengths={0: (1, 2), 1: (1, 2), 2: (1,), 3: (0,), 4: (0,)},
            )
            torch.bmm(ds_KQT, k_KTD, out=dq_KSGD[:, first:end].flatten(1, 2))
            dk_KSD[:, begin:end] += torch.bmm(ds_KQT.transpose(1, 2), q_KQD)
            dv_KSD[:, begin:end] += torch.bmm(p_KQT.transpose(1, 2), slope_KQD)
        dq, dk, dv = run(
            _lay_back, dq_KSGD, dk_KSD, dv_KSD, turns, lengths={0: (1,), 1: (1,), 2: (1,), 3: (0,)}
        )
        return dq, dk, dv, None, None


def _turn(x: Tensor, turns_SR2: Tensor, sign: float) -> Tensor:
    """x of shape S..D with its first 2R dimensions turned, neighbours together, in float32."""
    R = turns_SR2.shape[1]
    wide = x.float()
    pairs = wide[..., : 2 * R].unflatten(-1, (R, 2))
    cos, sin = (turns_SR2[..., part].unsqueeze(1) for part in (0, 1))
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = torch.stack((even * cos - sign * odd * sin, odd * cos + sign * even * sin), -1).flatten(-2)
    return torch.cat((turned, wide[..., 2 * R :]), -1).to(x.dtype)


def _lay(q_SND: Tensor, k_SKD: Tensor, v_SKD: Tensor, turns_SR2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys turned, all with the heads first."""
    S, K, D = k_SKD.shape
    q_SKGD = _turn(q_SND, turns_SR2, 1.0).view(S, K, -1, D)
    return (
        q_SKGD.transpose(0, 1).contiguous(),
        _turn(k_SKD, turns_SR2, 1.0).transpose(0, 1).contiguous(),
        v_SKD.transpose(0, 1).contiguous(),
    )


def _lay_back(
    dq_KSGD: Tensor, dk_KSD: Tensor, dv_KSD: Tensor, turns_SR2: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients as the projections made their outputs. Turning back is the transpose of turning."""
    return (
        _turn(dq_KSGD.transpose(0, 1).flatten(1, 2), turns_SR2, -1.0),
        _turn(dk_KSD.transpose(0, 1), turns_SR2, -1.0),
        dv_KSD.transpose(0, 1).contiguous(),
    )


def _divide(out_KSGD: Tensor, total_KSG: Tensor) -> Tensor:
    """What the softmax left undone, and the heads back beside each other."""
    out = (out_KSGD.float() / total_KSG.unsqueeze(-1)).to(out_KSGD.dtype)
    return out.transpose(0, 1).flatten(1, 2).contiguous()


def _marks(heads: int, groups: int, begin: int, first: int, end: int) -> tuple[Tensor, Tensor]:
    """Places of a tile's keys, and of the last key that each row sees. As numbers that a compiler can load:
    from indices it makes slow integer arithmetic."""
    places = torch.arange(end - begin, dtype=torch.float32)
    return places, places[first - begin :].repeat_interleave(groups).repeat(heads)


def _powers(
    scores_KQT: Tensor, places_T: Tensor, last_KQ: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A softmax that is not divided yet, its sums, and the logarithm of what it would be divided by."""
    K, Q, _ = scores_KQT.shape
    wide = scores_KQT.flatten(0, 1).float() * scale
    wide = torch.where(places_T <= last_KQ[:, None], wide, float("-inf"))
    top = wide.amax(-1, keepdim=True)
    powers = (wide - top).exp()
    total = powers.sum(-1, keepdim=True)
    return powers.to(scores_KQT.dtype).view_as(scores_KQT), total.view(K, Q), (top + total.log()).view(K, Q)


def _slope(
    scores_KQT: Tensor, dp_KQT: Tensor, norm_KQ: Tensor, places_T: Tensor, last_KQ: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The softmax again, and the gradient of the scores."""
    wide = scores_KQT.flatten(0, 1).float() * scale
    p = torch.where(places_T <= last_KQ[:, None], (wide - norm_KQ.flatten()[:, None]).exp(), 0.0)
    along = p * dp_KQT.flatten(0, 1).float()
    ds = (along - p * along.sum(-1, keepdim=True)) * scale
    return p.to(scores_KQT.dtype).view_as(scores_KQT), ds.to(scores_KQT.dtype).view_as(scores_KQT)
