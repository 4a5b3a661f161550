"""GELU, by tanh (ChatGLM-6B) or by erf, and GEGLU (GLM-130B), whose activation is on the second half."""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import gelu as torch_gelu

from glm_accelerate.kernels.choose import Form

Shape = Literal["tanh", "none"]  # how the normal distribution is computed; "none", by erf, is exact


def gelu_reference(x: Tensor, shape: Shape = "none") -> Tensor:
    """By definition: x times the share of a normal distribution below x."""
    if shape == "none":
        return x * 0.5 * (1 + torch.erf(x * 0.5**0.5))
    return x * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def geglu_reference(x: Tensor, shape: Shape = "none") -> Tensor:
    """By definition: first half * gelu(second half)."""
    one, two = x.chunk(2, dim=-1)
    return one * gelu_reference(two, shape)


def gelu(x: Tensor, shape: Shape = "none", form: Form = "eager") -> Tensor:
    """Keeps x alone. There is no compiled form."""
    assert form != "compiled"
    return _triton(x, shape, gated=False) if form == "triton" else torch_gelu(x, approximate=shape)


def geglu(x: Tensor, shape: Shape = "none", form: Form = "eager") -> Tensor:
    """First half * gelu(second half). Keeps x alone. There is no compiled form."""
    assert form != "compiled"
    out: Any = _triton(x, shape, gated=True) if form == "triton" else _GEGLU.apply(x, shape)
    return out


def _triton(x: Tensor, shape: Shape, gated: bool) -> Tensor:
    from glm_accelerate.kernels.triton_gelu import TritonGELU  # here: only some machines have Triton

    return TritonGELU.apply(x, shape == "tanh", gated)


class _GEGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Shape) -> Tensor:
        ctx.save_for_backward(x)
        ctx.shape = shape
        one, two = x.chunk(2, dim=-1)
        return torch_gelu(two, approximate=shape).mul_(one)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        (x,), (grad,) = ctx.saved_tensors, grad_outputs
        one, two = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        grad_one, grad_two = grad_x.chunk(2, dim=-1)
        torch.mul(grad, torch_gelu(two, approximate=ctx.shape), out=grad_one)
        torch.ops.aten.gelu_backward.grad_input(grad * one, two, approximate=ctx.shape, grad_input=grad_two)
        return grad_x, None
