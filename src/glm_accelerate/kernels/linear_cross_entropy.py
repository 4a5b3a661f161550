"""Projection to the vocabulary and cross-entropy in chunks of rows, so that the logits of a step never
exist at once. Gradients are made in the same pass as the loss, chunk by chunk, in float32 sums.

Letters: S rows that have a target, H width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from glm_accelerate.kernels.compiled import run

CHUNK_BYTES = 64 * 2**20  # of float32 logits alive at once: larger is no faster, smaller loses to launches


def linear_cross_entropy_reference(hidden_SH: Tensor, weight_VH: Tensor, labels_S: Tensor) -> Tensor:
    """The same by definition: all logits, then the sum of cross-entropies."""
    logits_SV = (hidden_SH @ weight_VH.to(hidden_SH.dtype).T).float()
    return cross_entropy(logits_SV, labels_S, reduction="sum")


def linear_cross_entropy(
    hidden_SH: Tensor, weight_VH: Tensor, labels_S: Tensor, compiled: bool = False
) -> Tensor:
    """Sum over rows of -log softmax(hidden @ weight.T)[label], as a float32 scalar."""
    return _Chunked.apply(hidden_SH, weight_VH, labels_S, compiled)  # pyright: ignore[reportReturnType]


def _rows(vocabulary: int) -> int:
    return max(64, CHUNK_BYTES // (4 * vocabulary) // 64 * 64)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_SH: Tensor, weight_VH: Tensor, labels_S: Tensor, compiled: bool) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        weight = weight_VH.to(hidden_SH.dtype)
        wide = torch.float64 if hidden_SH.dtype == torch.float64 else torch.float32
        total = torch.zeros((), dtype=wide, device=hidden_SH.device)
        grad_hidden = torch.empty_like(hidden_SH) if wants_hidden else None
        grad_weight = torch.zeros_like(weight_VH, dtype=wide) if wants_weight else None
        rows = _rows(weight_VH.shape[0])
        for start in range(0, hidden_SH.shape[0], rows):
            hidden, labels = hidden_SH[start : start + rows], labels_S[start : start + rows, None]
            logits = hidden @ weight.T
            if compiled and wide == torch.float32 and len(logits) > 1:
                losses, slope = run(_loss_and_slope, logits, labels, lengths={0: (0,), 1: (0,)})
            else:
                losses, slope = _in_place(logits.to(wide), labels)
            total += losses.sum()
            if grad_hidden is None and grad_weight is None:
                continue
            slope = slope.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(slope, weight, out=grad_hidden[start : start + rows])
            if grad_weight is not None:
                grad_weight += slope.T @ hidden
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight_VH.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, None, None]:
        (slope,) = grads
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            None if grad_hidden is None else grad_hidden.mul_(slope.to(grad_hidden.dtype)),
            None if grad_weight is None else grad_weight.mul_(slope).to(ctx.weight_dtype),
            None,
            None,
        )


def _in_place(logits_SV: Tensor, labels_S1: Tensor) -> tuple[Tensor, Tensor]:
    """Losses of rows and their slope, which takes the place of the logits."""
    picked = logits_SV.gather(1, labels_S1)
    normalizer = logits_SV.logsumexp(1, keepdim=True)
    slope = logits_SV.sub_(normalizer).exp_()
    slope.scatter_add_(1, labels_S1, slope.new_full(labels_S1.shape, -1.0))
    return normalizer - picked, slope


def _loss_and_slope(logits_SV: Tensor, labels_S1: Tensor) -> tuple[Tensor, Tensor]:
    """The same for the compiler: no pass but the two that a softmax needs."""
    wide = logits_SV.float()
    top = wide.amax(1, keepdim=True)
    total = (wide - top).exp().sum(1, keepdim=True)
    normalizer = top + total.log()
    chosen = torch.arange(wide.shape[1], device=wide.device, dtype=torch.int32) == labels_S1.to(torch.int32)
    slope = (wide - normalizer).exp() - chosen.float()
    return normalizer - wide.gather(1, labels_S1), slope.to(logits_SV.dtype)
