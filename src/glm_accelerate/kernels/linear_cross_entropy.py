"""Projection to the vocabulary and cross-entropy in chunks of rows, so that the logits of a step never
exist at once. Gradients are made in the same pass as the loss, chunk by chunk, in float32 sums.

Letters: S rows that have a target, H width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

CHUNK_BYTES = (
    64 * 2**20
)  # of float32 logits alive at once: larger brings no speed, smaller loses it to launches


def linear_cross_entropy_reference(hidden_SH: Tensor, weight_VH: Tensor, labels_S: Tensor) -> Tensor:
    """The same by definition: all logits, then the sum of cross-entropies."""
    logits_SV = (hidden_SH @ weight_VH.to(hidden_SH.dtype).T).float()
    return cross_entropy(logits_SV, labels_S, reduction="sum")


def linear_cross_entropy(hidden_SH: Tensor, weight_VH: Tensor, labels_S: Tensor) -> Tensor:
    """Sum over rows of -log softmax(hidden @ weight.T)[label], as a float32 scalar."""
    return _Chunked.apply(hidden_SH, weight_VH, labels_S)  # pyright: ignore[reportReturnType]


def _rows(vocabulary: int) -> int:
    return max(64, CHUNK_BYTES // (4 * vocabulary) // 64 * 64)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_SH: Tensor, weight_VH: Tensor, labels_S: Tensor) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        weight = weight_VH.to(hidden_SH.dtype)
        wide = torch.float64 if hidden_SH.dtype == torch.float64 else torch.float32
        total = torch.zeros((), dtype=wide, device=hidden_SH.device)
        grad_hidden = torch.empty_like(hidden_SH) if wants_hidden else None
        grad_weight = torch.zeros_like(weight_VH, dtype=wide) if wants_weight else None
        rows = _rows(weight_VH.shape[0])
        for start in range(0, hidden_SH.shape[0], rows):
            hidden, labels = hidden_SH[start : start + rows], labels_S[start : start + rows, None]
            logits = (hidden @ weight.T).to(wide)
            picked = logits.gather(1, labels)
            normalizer = logits.logsumexp(1, keepdim=True)
            total += (normalizer - picked).sum()
            if grad_hidden is None and grad_weight is None:
                continue
            slope = logits.sub_(normalizer).exp_()  # softmax, in place of the logits
            slope.scatter_add_(1, labels, slope.new_full(labels.shape, -1.0))
            slope = slope.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(slope, weight, out=grad_hidden[start : start + rows])
            if grad_weight is not None:
                grad_weight += slope.T @ hidden
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight_VH.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, None]:
        (slope,) = grads
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            None if grad_hidden is None else grad_hidden * slope.to(grad_hidden.dtype),
            None if grad_weight is None else (grad_weight * slope).to(ctx.weight_dtype),
            None,
        )
