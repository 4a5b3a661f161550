"""LayerNorm with the sum before it: norm(alpha * x + dropout(branch)), as DeepNorm's blocks have it
(ChatGLM-6B and GLM-130B, alpha = sqrt(2 * layers)).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm as torch_layer_norm

from glm_accelerate.kernels.choose import Form
from glm_accelerate.kernels.dropout import keep_mask


def layer_norm_reference(x_BTH: Tensor, weight_H: Tensor, bias_H: Tensor, epsilon: float) -> Tensor:
    """By definition: (x - mean) / deviation * weight + bias, in x's dtype."""
    wide = x_BTH.to(torch.promote_types(x_BTH.dtype, torch.float32))
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + epsilon)
    return (normed * weight_H.to(wide.dtype) + bias_H.to(wide.dtype)).to(x_BTH.dtype)


def layer_norm(
    x_BTH: Tensor, weight_H: Tensor, bias_H: Tensor, epsilon: float, form: Form = "eager"
) -> Tensor:
    """In x's dtype, with statistics in float32. There is no compiled form."""
    assert form != "compiled"
    if form == "triton":
        return _triton(x_BTH, None, weight_H, bias_H, epsilon, 1.0, 0.0)
    # On a CPU torch sums a bfloat16 weight's gradient in bfloat16, with seven times the error.
    wide = torch.promote_types(x_BTH.dtype, torch.float32)
    wide_x, weight_H, bias_H = (each.to(wide) for each in (x_BTH, weight_H, bias_H))
    return torch_layer_norm(wide_x, x_BTH.shape[-1:], weight_H, bias_H, epsilon).to(x_BTH.dtype)


def deep_norm(
    x_BTH: Tensor,
    branch_BTH: Tensor,
    weight_H: Tensor,
    bias_H: Tensor,
    epsilon: float,
    *,
    alpha: float,
    dropout: float = 0.0,
    form: Form = "eager",
) -> Tensor:
    """norm(alpha * x + dropout(branch)). Dropout follows torch.manual_seed, in each form in its own way."""
    if form == "triton":
        return _triton(x_BTH, branch_BTH, weight_H, bias_H, epsilon, alpha, dropout)
    if dropout:
        branch_BTH = branch_BTH * keep_mask(branch_BTH, dropout) * (1 / (1 - dropout))
    return layer_norm(torch.add(branch_BTH, x_BTH, alpha=alpha), weight_H, bias_H, epsilon, form)


def _triton(*arguments: Any) -> Tensor:
    from glm_accelerate.kernels.triton_layer_norm import TritonDeepNorm  # only some machines have Triton

    return TritonDeepNorm.apply(*arguments)
