"""The gated unit of GLM's MLP: the activation is on the first half. Its own input is all that it keeps."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from glm_accelerate.kernels.choose import Form
from glm_accelerate.kernels.compiled import run


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """The same by definition: silu(first half) * second half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def swiglu(gate_up: Tensor, form: Form = "eager") -> Tensor:
    """silu(first half) * second half, in one pass each way unless it is eager."""
    if form == "native":
        return _Native.apply(gate_up)  # pyright: ignore[reportReturnType]
    if form == "triton":
        from glm_accelerate.kernels import triton_swiglu  # here: only some machines have Triton

        return triton_swiglu.swiglu(gate_up)
    out: Any = (_Compiled if form == "compiled" else _SwiGLU).apply(gate_up)
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


class _Native(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return torch.ops.glm_accelerate.swiglu(gate_up.flatten(0, -2)).view(*gate_up.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        rows, slope = gate_up.flatten(0, -2), slopes[0].flatten(0, -2).contiguous()
        return torch.ops.glm_accelerate.swiglu_back(rows, slope).view_as(gate_up)


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        rows = gate_up.flatten(0, -2)
        return run(_gate, rows, lengths={0: (0,)}).view(*gate_up.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        rows, slope = gate_up.flatten(0, -2), slopes[0].flatten(0, -2)
        return run(_gate_back, rows, slope, lengths={0: (0,), 1: (0,)}).view_as(gate_up)


def _gate(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * gate.sigmoid() * up).to(gate_up.dtype)


def _gate_back(gate_up: Tensor, slope: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    share, wide = gate.sigmoid(), slope.float()
    by_gate = wide * up * share * (1 + gate * (1 - share))
    return torch.cat((by_gate, wide * gate * share), -1).to(gate_up.dtype)
