"""Matrix products of 8-bit floats: each tensor is scaled so that its largest number is the largest there is,
e4m3 for activations and weights, e5m2 (more range, fewer digits) for gradients; sums are float32.

Letters: S rows, I inputs, O outputs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, pad, scaled_mm

from glm_accelerate.kernels.compiled import missing as not_compiled
from glm_accelerate.kernels.compiled import run

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
CAPABILITY = (8, 9)  # Ada and Hopper
MULTIPLE = 16  # what the hardware wants of every dimension that a product goes along


@dataclass(frozen=True, slots=True)
class Eight:
    """A tensor in 8 bits: number * scale is what it was."""

    number: Tensor
    scale: Tensor

    @property
    def T(self) -> "Eight":
        return Eight(self.number.T, self.scale)


def missing() -> str | None:
    """What this machine lacks, or None."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    capability = torch.cuda.get_device_capability()
    if capability < CAPABILITY:
        name = torch.cuda.get_device_name()
        return f"{name} has capability {capability[0]}.{capability[1]}, 8-bit products need 8.9"
    return None


def eight(x: Tensor, dtype: torch.dtype) -> Eight:
    """Rounded to 8 bits. Zeros stay zeros; what is not finite stays so.

    On a GPU two compiled passes over memory: as operators it would take as long as the product saves.
    """
    flat = x.detach().contiguous().view(-1)
    fused = x.is_cuda and not_compiled(x.device.type) is None
    number, scale = run(rounded, flat, dtype, lengths={0: (0,)}) if fused else rounded(flat, dtype)
    return Eight(number.view(x.shape), scale)


def rounded(flat: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The numbers in 8 bits, and their scale."""
    largest = flat.abs().amax().float().clamp(min=torch.finfo(torch.float32).tiny)
    scale = largest / torch.finfo(dtype).max
    return (flat.float() / scale).to(dtype), scale


def product_reference(left_SI: Eight, right_IO: Eight, dtype: torch.dtype) -> Tensor:
    """By definition: what was rounded, multiplied in float32."""
    out = left_SI.number.float() @ right_IO.number.float()
    return (out * (left_SI.scale * right_IO.scale)).to(dtype)


def product(left_SI: Eight, right_IO: Eight, dtype: torch.dtype, *, quick: bool = False) -> Tensor:
    """The same on hardware that has it, which wants rows of the left and columns of the right side by side.

    `quick`: sums of fewer digits, enough for a forward pass.
    """
    short = -left_SI.number.shape[1] % MULTIPLE
    left, right = left_SI.number, right_IO.number.T
    if short:
        left, right = (pad(each.view(torch.uint8), (0, short)).view(each.dtype) for each in (left, right))
    whole = ScalingType.TensorWise
    return scaled_mm(
        left.contiguous(),
        right.contiguous().T,
        left_SI.scale,
        whole,
        right_IO.scale,
        whole,
        output_dtype=dtype,
        use_fast_accum=quick,
    )


def float8_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, *, simulated: bool = False) -> Tensor:
    """x @ weight.T + bias in x's dtype, all three products of both passes in 8 bits.

    `simulated`: rounded in the same way and multiplied in float32, on any device.
    """
    out_SO: Any = _Float8Linear.apply(x.flatten(0, -2), weight_OI, simulated)
    out_SO = out_SO if bias_O is None else out_SO + bias_O.to(x.dtype)
    return out_SO if x.ndim == 2 else out_SO.unflatten(0, x.shape[:-1])


class _Float8Linear(torch.autograd.Function):
    """Of activations and weight the 8-bit form is kept; of activations only for a weight that learns."""

    @staticmethod
    def forward(ctx: Any, x_SI: Tensor, weight_OI: Tensor, simulated: bool) -> Tensor:
        left, right = eight(x_SI, FORWARD), eight(weight_OI, FORWARD)
        kept = left.number if ctx.needs_input_grad[1] else x_SI.new_empty(0)
        ctx.save_for_backward(kept, left.scale, right.number, right.scale)
        ctx.simulated, ctx.weight_dtype = simulated, weight_OI.dtype
        if simulated:
            return product_reference(left, right.T, x_SI.dtype)
        return product(left, right.T, x_SI.dtype, quick=True)

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor | None, Tensor | None, None]:
        kept, scale, weight, weight_scale = ctx.saved_tensors
        multiply, dtype = product_reference if ctx.simulated else product, slopes[0].dtype
        slope_SO = eight(slopes[0], BACKWARD)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = multiply(slope_SO, Eight(weight, weight_scale), dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = multiply(slope_SO.T, Eight(kept, scale), dtype).to(ctx.weight_dtype)
        return grad_x, grad_weight, None
