"""Matrix products of 8-bit floats (e4m3) with float32 sums. A row of activations or gradients has a scale of
its own, so that no token depends on its neighbours; so has a row of the weight. Scales never vary along a
product's sum: in the backward pass the same tensors are rounded again, with a scale for each column.

Letters: S rows, I inputs, O outputs.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from glm_accelerate.kernels.compiled import missing as not_compiled
from glm_accelerate.kernels.compiled import run
from glm_accelerate.runtime.device import current_device, device_kind, device_of

E4M3 = torch.float8_e4m3fn
CAPABILITY = (8, 9)  # Ada and Hopper
SCALED_BY_ROW = (9, 10)  # capabilities, by their first number, whose products take a scale for each row
MULTIPLE = 16  # what the hardware wants of every dimension that a product goes along


@dataclass(frozen=True, slots=True)
class Eight:
    """A matrix in 8 bits, about number * scale. The scale has one row, or one column."""

    number: Tensor
    scale: Tensor

    @property
    def T(self) -> "Eight":
        return Eight(self.number.T, self.scale.T)


def missing() -> str | None:
    """What this machine lacks, or None."""
    record = current_device()
    if record.kind == "cpu":
        return "there is no GPU"
    capability = record.capability()
    if capability < CAPABILITY:
        return f"{record.name()} has capability {capability[0]}.{capability[1]}, 8-bit products need 8.9"
    return None


def eight(x: Tensor, each: Literal["row", "column"]) -> Eight:
    """Rounded to 8 bits, with a scale for each row or column. Zeros stay zeros; infinities and NaN stay.

    On a GPU two compiled passes over memory: as operators it would take as long as the product saves.
    """
    body = rounded_rows if each == "row" else rounded_columns
    x = x.detach().contiguous()
    if device_kind(x.device.type).gpu_kernels and not_compiled(x.device.type) is None:
        return Eight(*run(body, x, lengths={0: (0, 1)}))
    return Eight(*body(x))


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers in 8 bits, and a column of scales."""
    return _rounded(x, 1)


def rounded_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers in 8 bits, and a row of scales."""
    return _rounded(x, 0)


def _rounded(x: Tensor, along: int) -> tuple[Tensor, Tensor]:
    largest = x.abs().amax(along, keepdim=True).float().clamp(min=torch.finfo(torch.float32).tiny)
    scale = largest / torch.finfo(E4M3).max
    return (x.float() / scale).to(E4M3), scale


def product_reference(left_SI: Eight, right_IO: Eight, dtype: torch.dtype) -> Tensor:
    """By definition: what was rounded, multiplied in float32."""
    out = left_SI.number.float() @ right_IO.number.float()
    return (out * left_SI.scale * right_IO.scale).to(dtype)


def product(left_SI: Eight, right_IO: Eight, dtype: torch.dtype, *, quick: bool = False) -> Tensor:
    """By hardware, which wants rows of the left and columns of the right to lie side by side.

    `quick`: sums of fewer digits, enough for a forward pass.
    """
    assert left_SI.scale.shape[1] == right_IO.scale.shape[0] == 1, "a scale goes along the sum"
    short = -left_SI.number.shape[1] % MULTIPLE
    left, right = left_SI.number, right_IO.number.T
    if short:
        left, right = (pad(each.view(torch.uint8), (0, short)).view(each.dtype) for each in (left, right))
    numbers, one = (left.contiguous(), right.contiguous().T), left_SI.scale.new_ones(())
    by_row = dtype == torch.bfloat16 and device_of(left.device).capability()[0] in SCALED_BY_ROW
    scales = (left_SI.scale.contiguous(), right_IO.scale.contiguous()) if by_row else (one, one)
    out_dtype = dtype if by_row else torch.float32
    # Not torch.nn.functional.scaled_mm, which torch 2.11 need not have.
    out = torch._scaled_mm(*numbers, *scales, out_dtype=out_dtype, use_fast_accum=quick)  # pyright: ignore[reportPrivateUsage]
    return out if by_row else out.mul_(left_SI.scale).mul_(right_IO.scale).to(dtype)


def float8_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, *, simulated: bool = False) -> Tensor:
    """x @ weight.T + bias in x's dtype, all three products of both passes in 8 bits.

    `simulated`: rounded in the same way and multiplied in float32, on any device.
    """
    out_SO: Any = _Float8Linear.apply(x.flatten(0, -2), weight_OI, simulated)
    out_SO = out_SO if bias_O is None else out_SO + bias_O.to(x.dtype)
    return out_SO if x.ndim == 2 else out_SO.unflatten(0, x.shape[:-1])


class _Float8Linear(torch.autograd.Function):
    """Keeps the weight as it is, and activations in 8 bits for a weight that trains."""

    @staticmethod
    def forward(ctx: Any, x_SI: Tensor, weight_OI: Tensor, simulated: bool) -> Tensor:
        kept = eight(x_SI, "column") if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(weight_OI, *((kept.number, kept.scale) if kept is not None else ()))
        ctx.simulated = simulated
        left, right = eight(x_SI, "row"), eight(weight_OI, "row").T
        if simulated:
            return product_reference(left, right, x_SI.dtype)
        return product(left, right, x_SI.dtype, quick=True)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, Tensor | None, None]:
        weight_OI, *kept = ctx.saved_tensors
        multiply, grad_SO = product_reference if ctx.simulated else product, grad_outputs[0]
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = multiply(eight(grad_SO, "row"), eight(weight_OI, "column"), grad_SO.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = multiply(eight(grad_SO, "column").T, Eight(*kept), grad_SO.dtype)
            grad_weight = grad_weight.to(weight_OI.dtype)
        return grad_x, grad_weight, None
