"""The gated unit of GLM's MLP: the activation is on the first half. Only its own input is kept."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from glm_accelerate.kernels.choose import Form
from glm_accelerate.kernels.compiled import run


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """By definition: silu(first half) * second half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def swiglu(gate_up: Tensor, form: Form = "eager") -> Tensor:
    """silu(first half) * second half, in one pass each way unless it is eager."""
    if form == "triton":
        from glm_accelerate.kernels.triton_swiglu import TritonSwiGLU  # here: only some machines have Triton

        return TritonSwiGLU.apply(gate_up)
    out: Any = {"eager": _SwiGLU, "compiled": _Compiled, "native": _Native}[form].apply(gate_up)
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Tensor:
        (gate_up,), (grad,) = ctx.saved_tensors, grad_outputs
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(grad, silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_gate_up


class _Native(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return torch.ops.glm_accelerate.swiglu(gate_up.flatten(0, -2)).view(*gate_up.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        rows, grad = gate_up.flatten(0, -2), grad_outputs[0].flatten(0, -2).contiguous()
        return torch.ops.glm_accelerate.swiglu_backward(rows, grad).view_as(gate_up)


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        rows = gate_up.flatten(0, -2)
        return run(_forward, rows, lengths={0: (0,)}).view(*gate_up.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        rows, grad = gate_up.flatten(0, -2), grad_outputs[0].flatten(0, -2)
        return run(_backward, rows, grad, lengths={0: (0,), 1: (0,)}).view_as(gate_up)


def _forward(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * gate.sigmoid() * up).to(gate_up.dtype)


def _backward(gate_up: Tensor, grad: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    share, wide = gate.sigmoid(), grad.float()
    grad_gate = wide * up * share * (1 + gate * (1 - share))
    return torch.cat((grad_gate, wide * gate * share), -1).to(gate_up.dtype)
