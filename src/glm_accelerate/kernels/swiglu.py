"""The gated unit of GLM's MLP: the activation is on the first half. Its own input is all that it keeps."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """The same by definition: silu(first half) * second half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half."""
    out: Any = _SwiGLU.apply(gate_up)
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        (slope,) = slopes
        gate, up = gate_up.chunk(2, dim=-1)
        made = torch.empty_like(gate_up)
        made_gate, made_up = made.chunk(2, dim=-1)
        torch.mul(slope, silu(gate), out=made_up)
        torch.ops.aten.silu_backward.grad_input(slope * up, gate, grad_input=made_gate)
        return made
