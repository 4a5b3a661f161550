"""Rotary positions as GLM has them: neighbours (2i, 2i+1) turn, and only the first dimensions of a head.

A pair of neighbours is a complex number and a rotation a product with one: a single pass over memory.
"""

from typing import Any

import torch
from torch import Tensor


def rope_table(positions_BT: Tensor, width: int, theta: float) -> Tensor:
    """cos + i sin of every position, of shape BT1R with R = width / 2."""
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=positions_BT.device) / width
    angles = positions_BT[:, :, None, None].float() * theta**-exponents
    return torch.complex(angles.cos(), angles.sin())


def rope_reference(x_BTND: Tensor, table_BT1R: Tensor) -> Tensor:
    """The same by definition, in x's dtype."""
    R = table_BT1R.shape[-1]
    cos, sin = table_BT1R.real.to(x_BTND.dtype), table_BT1R.imag.to(x_BTND.dtype)
    even, odd = x_BTND[..., 0 : 2 * R : 2], x_BTND[..., 1 : 2 * R : 2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((turned, x_BTND[..., 2 * R :]), dim=-1)


def rope(x_BTND: Tensor, table_BT1R: Tensor) -> Tensor:
    """Turns the first 2R dimensions of every head by its token's position; the rest passes through."""
    turned: Any = _Turn.apply(x_BTND, table_BT1R)
    return turned


def _turn(x: Tensor, table: Tensor) -> Tensor:
    """In float32 at least, rounded once."""
    R = table.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    pairs = torch.view_as_complex(x[..., : 2 * R].to(wide).unflatten(-1, (-1, 2)).contiguous())
    out = x.clone(memory_format=torch.contiguous_format)
    out[..., : 2 * R] = torch.view_as_real(pairs * table.to(pairs.dtype)).flatten(-2)
    return out


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(table)
        return _turn(x, table)

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor, None]:
        (table,) = ctx.saved_tensors
        return _turn(slopes[0], table.conj()), None  # turning back is the transpose of turning
