"""Causal attention in bfloat16 products, for CPUs that multiply it in hardware.

A document is done in blocks of queries, each against the keys before its end, so that half of the square
is never computed; query heads that share a key head are one matrix, so nothing is repeated. The scores are
made again in the backward pass. S tokens of a row, N query heads, K key/value heads, D head width.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

BLOCK = 128  # queries at a time: 24 ms for 1,024 tokens, forward and backward, where 256 took 29


def attention_blocks(q_SND: Tensor, k_SKD: Tensor, v_SKD: Tensor, lengths: Sequence[int]) -> Tensor:
    """Documents of `lengths` side by side in one row. Returns out_SND."""
    out: Any = _Blocks.apply(q_SND, k_SKD, v_SKD, tuple(lengths))
    return out


def _documents(lengths: Sequence[int]) -> Iterator[slice]:
    start = 0
    for length in lengths:
        yield slice(start, start + length)
        start += length


def _blocks(document: slice) -> Iterator[tuple[slice, int]]:
    """Rows of each block of queries, and how many keys of the document it sees."""
    for start in range(document.start, document.stop, BLOCK):
        stop = min(start + BLOCK, document.stop)
        yield slice(start, stop), stop - document.start


def _group(x_TND: Tensor, K: int) -> Tensor:
    """Heads that share a key head, one below the other: K, heads * T, D."""
    T, N, D = x_TND.shape
    return x_TND.view(T, K, N // K, D).permute(1, 2, 0, 3).reshape(K, -1, D)


def _ungroup(x_KRD: Tensor, T: int) -> Tensor:
    K, R, D = x_KRD.shape
    return x_KRD.view(K, R // T, T, D).permute(2, 0, 1, 3).reshape(T, -1, D)


def _probabilities(q_KRD: Tensor, k_KED: Tensor, T: int, hidden_TT: Tensor) -> Tensor:
    """Softmax over the E keys that a block of T queries sees: each query the last T up to itself."""
    scores = (q_KRD * q_KRD.shape[-1] ** -0.5) @ k_KED.transpose(1, 2)
    scores.unflatten(1, (-1, T))[..., -T:] += hidden_TT[:T, :T]
    return scores.softmax(-1)


def _hidden(like: Tensor) -> Tensor:
    return torch.full((BLOCK, BLOCK), -torch.inf, dtype=like.dtype, device=like.device).triu(1)


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.lengths = lengths
        out, hidden = torch.empty_like(q), _hidden(q)
        for document in _documents(lengths):
            keys, values = (x[document].transpose(0, 1).contiguous() for x in (k, v))
            for rows, seen in _blocks(document):
                T = rows.stop - rows.start
                weights = _probabilities(_group(q[rows], keys.shape[0]), keys[:, :seen], T, hidden)
                out[rows] = _ungroup(weights @ values[:, :seen], T)
        return out

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        (slope,) = slopes
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
        hidden, K, scale = _hidden(q), k.shape[1], q.shape[-1] ** -0.5
        for document in _documents(ctx.lengths):
            keys, values = (x[document].transpose(0, 1).contiguous() for x in (k, v))
            sum_k, sum_v = (torch.zeros_like(keys, dtype=torch.float32) for _ in range(2))
            for rows, seen in _blocks(document):
                T = rows.stop - rows.start
                queries, above = _group(q[rows], K), _group(slope[rows], K)
                weights = _probabilities(queries, keys[:, :seen], T, hidden)
                of_weights = above @ values[:, :seen].transpose(1, 2)
                of_scores = torch.ops.aten._softmax_backward_data(of_weights, weights, -1, weights.dtype)
                of_scores.mul_(scale)
                grad_q[rows] = _ungroup(of_scores @ keys[:, :seen], T)
                sum_k[:, :seen] += of_scores.transpose(1, 2) @ queries
                sum_v[:, :seen] += weights.transpose(1, 2) @ above
            grad_k[document], grad_v[document] = sum_k.transpose(0, 1), sum_v.transpose(0, 1)
        return grad_q, grad_k, grad_v, None
