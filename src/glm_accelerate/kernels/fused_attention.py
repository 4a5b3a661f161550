"""Rotary positions and causal attention of packed documents on a CPU: a few large products in bfloat16, all
between them compiled. Documents are cut into blocks of tokens. The first blocks of all documents are computed
together, then the second ones with the two blocks of keys that each sees, and so on.
"""

# Letters: S tokens in all, B blocks, T tokens of a block, K key/value heads, G query heads for each,
# N = K * G, D head width, H pairs of dimensions that turn; R = T * G rows of a block's queries in a key head,
# X rows of all blocks and heads that are computed together, W keys that they see.

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from glm_accelerate.kernels.compiled import run

BLOCK = 128  # smaller blocks compute less that is not seen, larger ones have fewer and larger products


@dataclass(frozen=True, slots=True)
class Round:
    """Blocks that see equally many blocks of keys, their own the last: at most one of each document."""

    first: int
    end: int
    keys: Tensor  # for each block and key head, where its keys are in (block, key head)
    last_X: Tensor  # the last key that a row sees


@dataclass(frozen=True, slots=True)
class Tiling:
    """How documents lie in blocks. A place after a document's end repeats a token, and is not `filled`."""

    token_BT: Tensor
    filled_BT: Tensor
    block_S: Tensor  # where each token went
    place_S: Tensor
    places_W: (
        Tensor  # 0, 1, ... as numbers that a compiler can load: of indices it makes slow integer arithmetic
    )
    rounds: tuple[Round, ...]


@lru_cache(maxsize=4)  # every layer of a step asks for the same
def tile(lengths: tuple[int, ...], heads: int, groups: int) -> Tiling:
    """Blocks and rounds of documents that lie side by side, for K heads of G queries each."""
    starts = list(accumulate(lengths, initial=0))
    order = sorted(range(len(lengths)), key=lambda document: -lengths[document])
    own = torch.arange(BLOCK).repeat_interleave(groups)
    tokens: list[Tensor] = []
    filled: list[Tensor] = []
    firsts: list[int] = []  # where the blocks of each round begin
    rounds: list[Round] = []
    for before in range(0, max(lengths), BLOCK):
        here = [document for document in order if lengths[document] > before]
        places = torch.arange(before, before + BLOCK)
        for document in here:
            tokens.append(starts[document] + places.clamp(max=lengths[document] - 1))
            filled.append(places < lengths[document])
        first = len(tokens) - len(here)
        firsts.append(first)
        blocks = torch.arange(len(here))[:, None, None] + torch.tensor(firsts)
        keys = (blocks * heads + torch.arange(heads)[:, None]).flatten()
        last_X = (own + before).float().repeat(len(here) * heads)
        rounds.append(Round(first, len(tokens), keys, last_X))
    token_BT, filled_BT = torch.stack(tokens), torch.stack(filled)
    block_S, place_S = (where[token_BT[filled_BT].argsort()] for where in filled_BT.nonzero(as_tuple=True))
    places_W = torch.arange(len(rounds) * BLOCK, dtype=torch.float32)
    return Tiling(token_BT, filled_BT.float(), block_S, place_S, places_W, tuple(rounds))


def rotary_attention(
    q_SND: Tensor, k_SKD: Tensor, v_SKD: Tensor, turns_SH2: Tensor, lengths: Sequence[int]
) -> Tensor:
    """attention(rope(q), rope(k), v) for documents of `lengths`, with the heads side by side."""
    tiling = tile(tuple(lengths), k_SKD.shape[1], q_SND.shape[1] // k_SKD.shape[1])
    out: Any = _Attention.apply(q_SND, k_SKD, v_SKD, turns_SH2, tiling)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, turns: Tensor, tiling: Tiling) -> Tensor:
        lengths = {0: (0,), 1: (0,), 2: (0,), 3: (0,), 4: (0,)}
        q_BKRD, k_BKTD, v_BKTD = run(_lay, q, k, v, turns, tiling.token_BT, lengths=lengths)
        out_BKRD, norm_BKR = torch.empty_like(q_BKRD), q_BKRD.new_empty(q_BKRD.shape[:3], dtype=torch.float32)
        scale = q.shape[-1] ** -0.5
        for each in tiling.rounds:
            scores_XW = _scores(q_BKRD, k_BKTD, each)
            places_W = tiling.places_W[: scores_XW.shape[1]]
            lengths = {0: (0, 1), 1: (0,), 2: (0,)}
            p_XW, norm_X = run(_softmax, scores_XW, each.last_X, places_W, scale, lengths=lengths)
            mine = slice(each.first, each.end)
            out = out_BKRD[mine].flatten(0, 1)
            torch.bmm(p_XW.view(*out.shape[:2], -1), _keys(v_BKTD, each), out=out)
            norm_BKR[mine] = norm_X.view_as(norm_BKR[mine])
        lengths = {0: (0,), 1: (0,), 2: (0,)}
        out_SH = run(_gather, out_BKRD, tiling.block_S, tiling.place_S, lengths=lengths)
        ctx.save_for_backward(q_BKRD, k_BKTD, v_BKTD, turns, out_SH, norm_BKR)
        ctx.tiling = tiling
        return out_SH

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor | None, ...]:
        q_BKRD, k_BKTD, v_BKTD, turns, out_SH, norm_BKR = ctx.saved_tensors
        tiling: Tiling = ctx.tiling
        _, K, R, D = q_BKRD.shape
        laid = (out_SH.view(-1, K, R // BLOCK, D), slopes[0].reshape(-1, K, R // BLOCK, D))
        lengths = {0: (0,), 1: (0,), 2: (0,), 3: (0,)}
        slope_BKRD, along_BKR = run(_lay_slope, *laid, tiling.token_BT, tiling.filled_BT, lengths=lengths)
        dq_BKRD = torch.empty_like(q_BKRD)
        dk_BKTD, dv_BKTD = (torch.zeros_like(k_BKTD, dtype=torch.float32) for _ in range(2))
        for each in tiling.rounds:
            mine = slice(each.first, each.end)
            scores_XW, dp_XW = _scores(q_BKRD, k_BKTD, each), _scores(slope_BKRD, v_BKTD, each)
            p_XW, ds_XW = run(
                _slope,
                scores_XW,
                dp_XW,
                norm_BKR[mine].flatten(),
                along_BKR[mine].flatten(),
                each.last_X,
                tiling.places_W[: scores_XW.shape[1]],
                D**-0.5,
                lengths={0: (0, 1), 1: (0, 1), 2: (0,), 3: (0,), 4: (0,), 5: (0,)},
            )
            q, slope, dq = (every[mine].flatten(0, 1) for every in (q_BKRD, slope_BKRD, dq_BKRD))
            p, ds = (every.view(*q.shape[:2], -1) for every in (p_XW, ds_XW))
            torch.bmm(ds, _keys(k_BKTD, each), out=dq)
            _add(dk_BKTD, each, torch.bmm(ds.mT, q))
            _add(dv_BKTD, each, torch.bmm(p.mT, slope))
        lengths = {0: (0,), 1: (0,), 2: (0,), 3: (0,), 4: (0,), 5: (0,)}
        places = (turns, tiling.block_S, tiling.place_S)
        dq, dk, dv = run(_lay_back, dq_BKRD, dk_BKTD, dv_BKTD, *places, lengths=lengths)
        return dq, dk, dv, None, None


def _keys(x_BKTD: Tensor, each: Round) -> Tensor:
    """What a round's blocks see, for each block and key head."""
    T, D = x_BKTD.shape[2:]
    seen = x_BKTD.view(-1, T * D).index_select(0, each.keys)
    return seen.view((each.end - each.first) * x_BKTD.shape[1], -1, D)


def _add(x_BKTD: Tensor, each: Round, made: Tensor) -> None:
    """Adds to what a round's blocks saw."""
    flat = x_BKTD.view(-1, x_BKTD.shape[2] * x_BKTD.shape[3])
    flat.index_add_(0, each.keys, made.float().view(-1, flat.shape[1]))


def _scores(rows_BKRD: Tensor, x_BKTD: Tensor, each: Round) -> Tensor:
    """Products of a round's rows with all that they may see and more."""
    rows = rows_BKRD[each.first : each.end].flatten(0, 1)
    return torch.bmm(rows, _keys(x_BKTD, each).mT).flatten(0, 1)


def _turn(x: Tensor, turns_H2: Tensor, sign: float) -> Tensor:
    """x of shape ...D with its first 2H dimensions turned, neighbours together, in float32."""
    H = turns_H2.shape[-2]
    wide = x.float()
    pairs = wide[..., : 2 * H].unflatten(-1, (H, 2))
    cos, sin = (turns_H2[..., part].unsqueeze(-2) for part in (0, 1))
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = torch.stack((even * cos - sign * odd * sin, odd * cos + sign * even * sin), -1).flatten(-2)
    return torch.cat((turned, wide[..., 2 * H :]), -1)


def _lay(
    q_SND: Tensor, k_SKD: Tensor, v_SKD: Tensor, turns_SH2: Tensor, token_BT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys turned, all in blocks with the heads before the tokens."""
    (B, T), (_, K, D) = token_BT.shape, k_SKD.shape
    q_STND, k_STKD = (
        _turn(q_SND, turns_SH2, 1.0).to(q_SND.dtype),
        _turn(k_SKD, turns_SH2, 1.0).to(k_SKD.dtype),
    )
    q_BKRD = q_STND[token_BT].view(B, T, K, -1, D).transpose(1, 2).reshape(B, K, -1, D)
    k_BKTD, v_BKTD = (x[token_BT].transpose(1, 2).contiguous() for x in (k_STKD, v_SKD))
    return q_BKRD, k_BKTD, v_BKTD


def _lay_slope(
    out_SKGD: Tensor, slope_SKGD: Tensor, token_BT: Tensor, filled_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """The output's gradient in blocks, nothing where there is no token, and its product with the output."""
    slope = slope_SKGD[token_BT].float() * filled_BT[:, :, None, None, None]
    along = (slope * out_SKGD[token_BT].float()).sum(-1)
    laid = slope.to(slope_SKGD.dtype).transpose(1, 2).flatten(2, 3)
    return laid.contiguous(), along.transpose(1, 2).flatten(2, 3).contiguous()


def _lay_back(
    dq_BKRD: Tensor, dk_BKTD: Tensor, dv_BKTD: Tensor, turns_SH2: Tensor, block_S: Tensor, place_S: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients as the projections made their outputs. Turning back is the transpose of turning."""
    dq_BKTGD = dq_BKRD.unflatten(2, (dk_BKTD.shape[2], -1))
    return (
        _turn(dq_BKTGD[block_S, :, place_S].flatten(1, 2), turns_SH2, -1.0).to(dq_BKRD.dtype),
        _turn(dk_BKTD[block_S, :, place_S], turns_SH2, -1.0).to(dq_BKRD.dtype),
        dv_BKTD[block_S, :, place_S].to(dq_BKRD.dtype),
    )


def _gather(x_BKRD: Tensor, block_S: Tensor, place_S: Tensor) -> Tensor:
    """Tokens back in their order, heads side by side."""
    x_BKTGD = x_BKRD.unflatten(2, (BLOCK, x_BKRD.shape[2] // BLOCK))
    return x_BKTGD[block_S, :, place_S].flatten(1).contiguous()


def _seen(scores_XW: Tensor, last_X: Tensor, places_W: Tensor, scale: float) -> Tensor:
    """Scores in float32; minus infinity where a query may not look."""
    return torch.where(places_W <= last_X[:, None], scores_XW.float() * scale, float("-inf"))


def _softmax(scores_XW: Tensor, last_X: Tensor, places_W: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """And the logarithm of what it was divided by."""
    wide = _seen(scores_XW, last_X, places_W, scale)
    top = wide.amax(-1, keepdim=True)
    powers = (wide - top).exp()
    total = powers.sum(-1, keepdim=True)
    return (powers / total).to(scores_XW.dtype), (top + total.log()).squeeze(-1)


def _slope(
    scores_XW: Tensor,
    dp_XW: Tensor,
    norm_X: Tensor,
    along_X: Tensor,
    last_X: Tensor,
    places_W: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The softmax again, and the gradient of the scores."""
    p = (_seen(scores_XW, last_X, places_W, scale) - norm_X[:, None]).exp()
    ds = p * (dp_XW.float() - along_X[:, None]) * scale
    return p.to(scores_XW.dtype), ds.to(scores_XW.dtype)
