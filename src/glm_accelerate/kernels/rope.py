"""Rotary positions as GLM has them: neighbours (2i, 2i+1) turn, and only the first dimensions of a head."""

import torch
from torch import Tensor


def rope_tables(positions_BT: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, float32, each of shape BT1R with R = width / 2."""
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=positions_BT.device) / width
    angles = positions_BT[:, :, None, None].float() * theta**-exponents
    return angles.cos(), angles.sin()


def rope(x_BTND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first 2R dimensions of every head, in the tables' dtype; the rest passes through."""
    R = cos.shape[-1]
    even, odd = x_BTND[..., 0 : 2 * R : 2], x_BTND[..., 1 : 2 * R : 2]
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((rotated.to(x_BTND.dtype), x_BTND[..., 2 * R :]), dim=-1)
