"""Rotary positions: only the first dimensions of a head turn, with their neighbours (2i, 2i+1) as in ChatGLM
and GLM-4, or half against half (i, i + R) as in GLM-4.5 and GLM-130B.

A pair is a complex number and a rotation a product with one: a single pass over memory.
"""

from typing import Any

import torch
from torch import Tensor

from glm_accelerate.kernels.choose import Form


def rope_table(positions_BT: Tensor, width: int, theta: float) -> Tensor:
    """cos + i sin of every position, of shape BT1R with R = width / 2."""
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=positions_BT.device) / width
    angles = positions_BT[:, :, None, None].float() * theta**-exponents
    return torch.complex(angles.cos(), angles.sin())


def rope_reference(x_BTND: Tensor, table_BT1R: Tensor, halves: bool = False) -> Tensor:
    """By definition, in x's dtype."""
    R = table_BT1R.shape[-1]
    cos, sin = table_BT1R.real.to(x_BTND.dtype), table_BT1R.imag.to(x_BTND.dtype)
    pairs = x_BTND[..., : 2 * R].unflatten(-1, (2, R) if halves else (R, 2))
    one, two = pairs.unbind(-2 if halves else -1)
    turned = torch.stack((one * cos - two * sin, two * cos + one * sin), dim=-2 if halves else -1)
    return torch.cat((turned.flatten(-2), x_BTND[..., 2 * R :]), dim=-1)


def rope(x_BTND: Tensor, table_BT1R: Tensor, form: Form = "eager", halves: bool = False) -> Tensor:
    """Turns the first 2R dimensions of every head by its token's position; the rest passes through.

    `halves`: pairs are (i, i + R), else neighbours. There is no compiled form: alone it would gain nothing.
    """
    assert form != "compiled"
    if form == "triton":
        from glm_accelerate.kernels.triton_rope import TritonRope  # here: only some machines have Triton

        return TritonRope.apply(x_BTND, torch.view_as_real(table_BT1R).flatten(0, 2), halves)
    turned: Any = _Turn.apply(x_BTND, table_BT1R, halves)
    return turned


def _turn(x: Tensor, table: Tensor, halves: bool) -> Tensor:
    """In float32 at least, rounded once."""
    R = table.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    pairs = x[..., : 2 * R].to(wide)
    pairs = pairs.unflatten(-1, (2, R)).transpose(-1, -2) if halves else pairs.unflatten(-1, (R, 2))
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * table.to(wide.to_complex()))
    out = x.clone(memory_format=torch.contiguous_format)
    out[..., : 2 * R] = (turned.transpose(-1, -2) if halves else turned).flatten(-2)
    return out


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, halves: bool) -> Tensor:
        ctx.save_for_backward(table)
        ctx.halves = halves
        return _turn(x, table, halves)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None, None]:
        (table,) = ctx.saved_tensors  # turning back is the transpose of turning
        return _turn(grad_outputs[0], table.conj(), ctx.halves), None, None
