"""Root-mean-square norm; the statistics are float32 whatever comes in."""

import torch
from torch import Tensor


def rms_norm(x_BTH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """x / rms(x) * weight, in x's dtype."""
    x = x_BTH.float() if x_BTH.dtype in (torch.bfloat16, torch.float16) else x_BTH
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
    return (x * scale).to(x_BTH.dtype) * weight_H.to(x_BTH.dtype)
