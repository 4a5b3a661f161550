"""Softmax of scaled attention scores under a causal mask and a mask of padding, where attention is computed
product by product (GLM-130B's scores are scaled layer by layer, which flash attention cannot).

Letters: B rows, N heads, T queries, S keys.
"""

from typing import Any

import torch
from torch import Tensor

from glm_accelerate.kernels.choose import Form


def masked_softmax_reference(
    scores_BNTS: Tensor, scale: float, *, causal: bool = True, keys_BS: Tensor | None = None
) -> Tensor:
    """By definition, in float32 at least. A query that sees nothing gets zeros."""
    wide = scores_BNTS.to(torch.promote_types(scores_BNTS.dtype, torch.float32)) * scale
    seen = _seen(scores_BNTS, causal, keys_BS)
    return wide.masked_fill(~seen, float("-inf")).softmax(-1).where(seen, 0.0).to(scores_BNTS.dtype)


def masked_softmax(
    scores_BNTS: Tensor,
    scale: float,
    *,
    causal: bool = True,
    keys_BS: Tensor | None = None,
    form: Form = "eager",
) -> Tensor:
    """softmax(scale * scores). `causal`: the last query sees all S keys, the one before S - 1, and so on.
    `keys_BS` is true where a key may be seen. Keeps its result alone. There is no compiled form.
    """
    assert form != "compiled"
    if form == "triton":
        from glm_accelerate.kernels.triton_softmax import TritonMaskedSoftmax  # only where Triton is

        return TritonMaskedSoftmax.apply(scores_BNTS, scale, causal, keys_BS)
    out: Any = _MaskedSoftmax.apply(scores_BNTS, scale, causal, keys_BS)
    return out


def _seen(scores_BNTS: Tensor, causal: bool, keys_BS: Tensor | None) -> Tensor:
    T, S = scores_BNTS.shape[-2:]
    seen = torch.ones(T, S, dtype=torch.bool, device=scores_BNTS.device)
    seen = seen.tril(S - T) if causal else seen
    return seen if keys_BS is None else seen & keys_BS[:, None, None, :]


class _MaskedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, scale: float, causal: bool, keys_BS: Tensor | None) -> Tensor:
        wide = torch.promote_types(scores.dtype, torch.float32)
        seen = _seen(scores, causal, keys_BS)
        shares = scores.to(wide, copy=True).mul_(scale).masked_fill_(~seen, float("-inf")).softmax(-1)
        out = shares.masked_fill_(~seen, 0.0).to(scores.dtype)
        ctx.save_for_backward(out)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None, None, None]:
        (out,) = ctx.saved_tensors
        wide = torch.promote_types(out.dtype, torch.float32)
        along = grad_outputs[0].to(wide) * out
        return (along - out * along.sum(-1, keepdim=True)).mul_(ctx.scale).to(out.dtype), None, None, None
