# pyright: basic, reportMissingImports=false, reportCallIssue=false
"""Softmax, loss and the logits' gradient in one launch: a row is read for its sum, then read again from the
cache and written over with its gradient. Logits are the caller's own, of a chunk: nothing else reads them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 8_192, 16  # 16 numbers a thread: two loads of 16 bytes in bfloat16


def loss_and_gradient(logits_SV: Tensor, labels_S: Tensor, boost: float, wants_gradient: bool) -> Tensor:
    """Losses of rows, in float32. Writes `boost` times the gradient over the logits if it is wanted."""
    rows, vocabulary = logits_SV.shape
    assert logits_SV.is_contiguous()
    assert labels_S.is_contiguous()
    losses_S = torch.empty(rows, dtype=torch.float32, device=logits_SV.device)
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    warps = max(1, WARPS * block // BLOCK)
    _one_row[(rows,)](
        logits_SV, labels_S, losses_S, boost, wants_gradient, vocabulary, block, num_warps=warps
    )
    return losses_S


@triton.jit
def _one_row(
    logits, labels, losses, boost,
    GRADIENT: tl.constexpr, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * VOCABULARY
    label = tl.load(labels + row).to(tl.int32)
    column = tl.arange(0, BLOCK)
    top = float("-inf")
    total = 0.0
    picked = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, VOCABULARY, BLOCK):
        place = start + column
        x = tl.load(logits + place, mask=place < VOCABULARY, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        picked += tl.where(place == label, x, 0.0)  # not a load of its own: it would race with the gradient
        top = higher
    tl.store(losses + row, tl.log(total) + (top - tl.sum(picked, 0)))
    if GRADIENT:
        for start in range(0, VOCABULARY, BLOCK):
            place = start + column
            inside = place < VOCABULARY
            x = tl.load(logits + place, mask=inside, other=0.0).to(tl.float32)
            grad = (tl.exp(x - top) / total - tl.where(place == label, 1.0, 0.0)) * boost
            tl.store(logits + place, grad.to(logits.dtype.element_ty), mask=inside)
