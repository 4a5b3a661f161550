"""x W^T + b. `native`: on a CPU with bfloat16 products, where PyTorch leaves narrow ones to one thread, the
rows are shared out over all (native/product.cpp). S rows, I inputs, O outputs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def product(a: Tensor, b: Tensor, bias: Tensor | None, native: bool) -> Tensor:
    """a b + bias of two matrices. Not to be differentiated."""
    if native and a.dtype == torch.bfloat16:
        return torch.ops.glm_accelerate.product(a, b, bias)
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


def linear(
    x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, native: bool = False, copy_OI: Tensor | None = None
) -> Tensor:
    """In x's dtype, whatever dtype the weights are kept in. `copy`: the weight in x's dtype, if there is one;
    gradients are the weight's all the same, in its `grad_dtype`.
    """
    if native and x.dtype == torch.bfloat16:
        out: Any = _Linear.apply(x, weight_OI, bias_O, copy_OI)
        return out
    return functional.linear(x, weight_OI.to(x.dtype), None if bias_O is None else bias_O.to(x.dtype))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, copy_OI: Tensor | None
    ) -> Tensor:
        weight = weight_OI.to(x.dtype) if copy_OI is None else copy_OI
        bias = None if bias_O is None else bias_O.to(x.dtype)
        ctx.save_for_backward(x if weight_OI.requires_grad else None, weight)
        ctx.dtypes = (
            weight_OI.dtype if copy_OI is None else weight_OI.grad_dtype,
            None if bias_O is None else bias_O.dtype,
        )
        return product(x.flatten(0, -2), weight.T, bias, native=True).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        slope_SO = slopes[0].flatten(0, -2)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = product(slope_SO, weight, None, native=True).view(*slopes[0].shape[:-1], weight.shape[1])
        if ctx.needs_input_grad[1]:
            grad_weight = product(slope_SO.T, x.flatten(0, -2), None, native=True).to(ctx.dtypes[0])
        if ctx.needs_input_grad[2]:
            grad_bias = slope_SO.sum(0).to(ctx.dtypes[1])
        return grad_x, grad_weight, grad_bias, None
