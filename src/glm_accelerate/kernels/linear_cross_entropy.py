"""Projection to the vocabulary and cross-entropy in chunks of rows, so that the logits of a step never
exist at once. Gradients are made in the same pass as the loss, chunk by chunk, in float32 sums.

Letters: S rows that have a target, H width, V vocabulary.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from glm_accelerate.kernels.choose import Form, choose_form, facts_of
from glm_accelerate.kernels.compiled import run
from glm_accelerate.kernels.linear import product
from glm_accelerate.runtime.device import device_kind

# Of logits alive at once. On a CPU larger is no faster, smaller loses to launches; GPUs want large products.
CPU_BYTES, GPU_BYTES = 64 * 2**20, 256 * 2**20
ROWS = 64  # rows are filled up to a multiple
BOOST = 1024.0  # of float16 gradients: most of a wide softmax (1 / 151,552 each) would be subnormal


class VocabularyPart(Protocol):
    """Of several processes with the same rows, each has the weights of some words: which are here."""

    first: int

    def join(self, sums_2S: Tensor) -> Tensor:
        """Over all processes, of each row the logsumexp of the first and the sum of the second number."""
        ...


def linear_cross_entropy_reference(hidden_SH: Tensor, weight_VH: Tensor, labels_S: Tensor) -> Tensor:
    """By definition: all logits, then the sum of cross-entropies."""
    logits_SV = hidden_SH @ weight_VH.to(hidden_SH.dtype).T
    logits_SV = logits_SV.to(torch.promote_types(logits_SV.dtype, torch.float32))
    return cross_entropy(logits_SV, labels_S, reduction="sum")


def linear_cross_entropy(
    hidden_SH: Tensor,
    weight_VH: Tensor,
    labels_S: Tensor,
    form: Form | None = None,
    *,
    scale: float = 1.0,
    copy_VH: Tensor | None = None,
    part: VocabularyPart | None = None,
) -> Tensor:
    """`scale` times the sum over rows of -log softmax(hidden @ weight.T)[label], as a float32 scalar.

    `form` is as `choose_form` says unless it is given. Of a frozen weight there is no gradient. `copy`: the
    weight in the dtype of `hidden`, if there is one; the gradient is the weight's, in its `grad_dtype`.
    `part`: V are some of the words alone. The loss is that of all, the gradient of `hidden` what these make.
    """
    form = form or choose_form(facts_of(hidden_SH.device), hidden_SH.dtype, compiled=False)[0]
    learns = torch.is_grad_enabled()
    loss: Any = _Chunked.apply(hidden_SH, weight_VH, labels_S, form, learns, scale, copy_VH, part)
    return loss


def chunk_rows(rows: int, vocabulary: int, itemsize: int, budget: int) -> int:
    """Rows of a chunk whose logits take at most `budget` bytes: chunks of one size, a multiple of 64."""
    most = max(64, budget // (itemsize * vocabulary) // 64 * 64)
    chunks = max(1, -(-rows // most))
    return -(-rows // (64 * chunks)) * 64 or 64


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_SH: Tensor,
        weight_VH: Tensor,
        labels_S: Tensor,
        form: Form,
        learns: bool,
        scale: float,
        copy_VH: Tensor | None,
        part: VocabularyPart | None,
    ) -> Tensor:
        wants_hidden, wants_weight = (learns and wants for wants in ctx.needs_input_grad[:2])
        count = len(hidden_SH)
        if hidden_SH.device.type == "cpu":  # each number of rows has kernels of its own: 0.6 MB, some ms
            fill = -count % ROWS
            hidden_SH, labels_S = pad(hidden_SH, (0, 0, 0, fill)), pad(labels_S, (0, fill))
        weight = weight_VH.to(hidden_SH.dtype) if copy_VH is None else copy_VH
        wide = torch.float64 if hidden_SH.dtype == torch.float64 else torch.float32
        # Gradients are computed with their scale; in float16, where it might overflow, with BOOST. Compiled
        # code would be compiled again for each scale.
        boost = scale if form != "compiled" else 1.0
        boost = BOOST if hidden_SH.dtype == torch.float16 else boost
        total = torch.zeros((), dtype=wide, device=hidden_SH.device)
        grad_hidden = torch.empty_like(hidden_SH) if wants_hidden else None
        grad_weight: Tensor | None = None
        itemsize = hidden_SH.itemsize if form in ("triton", "native") else 4
        budget = GPU_BYTES if form == "triton" else CPU_BYTES
        if wants_weight and form != "triton":  # each chunk adds to all of it, so there are few
            budget = max(budget, 4 * weight_VH.numel())
        rows = chunk_rows(count, len(weight_VH), itemsize, budget)
        native = form == "native"
        for start in range(0, len(hidden_SH), rows):
            hidden, labels = hidden_SH[start : start + rows], labels_S[start : start + rows]
            logits = product(hidden, weight.T, None, native)
            wants_any = wants_hidden or wants_weight
            if part is None:
                losses, grad = _of_logits(logits, labels, form, boost, wants_any)
            else:
                losses, grad = _of_part(logits, labels, form, boost, wants_any, part)
            total += losses[: count - start].sum()
            if grad_hidden is not None:
                grad_hidden[start : start + rows] = product(grad, weight, None, native)
            added = _wide_product(grad.T, hidden, native) if wants_weight else None
            del logits, grad  # before the sum, which makes a float32 copy of a narrower part
            if added is not None:
                if grad_weight is not None:
                    grad_weight.add_(added)
                else:  # one chunk of all rows is not summed
                    grad_weight = added if rows >= len(hidden_SH) else added.to(wide)
            del added
        if wants_weight and grad_weight is None:  # no row has a target
            grad_weight = torch.zeros_like(weight_VH, dtype=wide)
        ctx.save_for_backward(None if grad_hidden is None else grad_hidden[:count], grad_weight)
        ctx.weight_dtype = weight_VH.grad_dtype if weight_VH.is_leaf else weight_VH.dtype
        ctx.boosted = boost / scale
        return total * scale

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        # Not a scalar tensor: it would be rounded to the gradient's dtype before the product.
        factor_11 = (grad_outputs[0] / ctx.boosted).view(1, 1)
        if grad_outputs[0].device.type != "cpu" or factor_11 != 1:  # a CPU can look without waiting
            grad_hidden = None if grad_hidden is None else torch.mul(grad_hidden, factor_11, out=grad_hidden)
            if grad_weight is not None:
                wide = grad_weight.to(torch.promote_types(grad_weight.dtype, ctx.weight_dtype))
                grad_weight = wide.mul_(factor_11)
        return grad_hidden, None if grad_weight is None else grad_weight.to(ctx.weight_dtype), *(None,) * 6


def _of_logits(
    logits_SV: Tensor, labels_S: Tensor, form: Form, boost: float, wants_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Losses of rows, and `boost` times their gradient in the logits' dtype."""
    if form == "triton":
        from glm_accelerate.kernels.triton_cross_entropy import loss_and_gradient  # only where Triton is

        return loss_and_gradient(logits_SV, labels_S, boost, wants_gradient), logits_SV
    if form == "native":
        return torch.ops.glm_accelerate.loss_and_gradient(logits_SV, labels_S, boost), logits_SV
    if form == "compiled" and len(logits_SV) > 1:
        return run(_loss_and_gradient, logits_SV, labels_S[:, None], boost, lengths={0: (0,), 1: (0,)})
    wide = logits_SV.to(torch.promote_types(logits_SV.dtype, torch.float32))
    losses, grad = _in_place(wide, labels_S[:, None], boost)
    return losses, grad.to(logits_SV.dtype)


def _of_part(
    logits_SV: Tensor, labels_S: Tensor, form: Form, boost: float, wants_grad: bool, part: VocabularyPart
) -> tuple[Tensor, Tensor]:
    """The same where other processes have the other words: a softmax over these words is the softmax over all
    divided by the share of these.
    """
    own_S = labels_S - part.first
    here_S = (own_S >= 0) & (own_S < logits_SV.shape[1])
    own_S = own_S.where(here_S, 0)  # of other words any one, and corrected below
    picked_S = logits_SV.gather(1, own_S[:, None])[:, 0]
    picked_S = picked_S.to(torch.promote_types(picked_S.dtype, torch.float32))
    losses, grad_SV = _of_logits(logits_SV, own_S, form, boost, wants_grad)
    sums_S = losses.flatten() + picked_S
    all_S, target_S = part.join(torch.stack((sums_S, picked_S * here_S)))
    if wants_grad:
        share_S1 = (sums_S - all_S).exp()[:, None]
        # A few rows at a time on a CPU, where torch makes wide copies of what a wide number multiplies.
        few = ROWS if grad_SV.device.type == "cpu" else len(grad_SV)
        for grad, share in zip(grad_SV.split(few), share_S1.split(few), strict=True):
            grad.mul_(share)
        picked_grad_S = boost * ((picked_S - all_S).exp() - here_S.to(all_S))
        grad_SV.scatter_(1, own_S[:, None], picked_grad_S[:, None].to(grad_SV.dtype))
    return all_S - target_S, grad_SV


def _in_place(logits_SV: Tensor, labels_S1: Tensor, boost: float) -> tuple[Tensor, Tensor]:
    """Losses of rows and `boost` times their gradient, written over the logits."""
    logits_SV.sub_(logits_SV.amax(1, keepdim=True))
    picked = logits_SV.gather(1, labels_S1)
    grad = logits_SV.exp_()
    total = grad.sum(1, keepdim=True)
    grad.div_(total / boost).scatter_add_(1, labels_S1, grad.new_full(labels_S1.shape, -boost))
    return total.log() - picked, grad


def _loss_and_gradient(logits_SV: Tensor, labels_S1: Tensor, boost: float) -> tuple[Tensor, Tensor]:
    """`_in_place` for the compiler: in the two passes that a softmax needs."""
    wide = logits_SV.float()
    low = wide - wide.amax(1, keepdim=True)
    total = low.exp().sum(1, keepdim=True)
    chosen = torch.arange(wide.shape[1], device=wide.device, dtype=torch.int32) == labels_S1.to(torch.int32)
    grad = ((low - total.log()).exp() - chosen.float()) * boost
    return total.log() - low.gather(1, labels_S1), grad.to(logits_SV.dtype)


def _wide_product(a: Tensor, b: Tensor, native: bool) -> Tensor:
    """a @ b, in float32 where that costs nothing, and in float16, where boosted sums would overflow."""
    if device_kind(a.device.type).wide_products and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float() if a.dtype == torch.float16 else product(a, b, None, native)
