"""Frozen weights in four or eight bits, and products with them: the wide weight exists only while it is used.

nf4: blocks of 64 along a row, each value one of 16 levels times the block's largest, itself in 8 bits.
int8 and fp8 (e4m3): a scale a row. Rows are independent: a weight is packed, read and divided by rows.
S rows of x, I inputs, O outputs, P bytes of a row, K blocks of a row, r rank.
"""

import logging
import warnings
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from glm_accelerate.kernels.choose import Choice

Kind = Literal["nf4", "int8", "fp8"]

BLOCK = 64
# Quantiles of a normal distribution, as the QLoRA paper has them: zero and both ends are exact.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
INT8_MOST, FP8_MOST = 127, 448
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEAST = torch.finfo(torch.float32).tiny  # divisors are never zero
PACKED_AT_ONCE, UNPACKED_AT_ONCE = 1 << 18, 1 << 22  # weights, of which there are float32 copies meanwhile


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight of O x I in few bits."""

    kind: Kind
    inputs: int
    codes_OP: Tensor  # nf4: two in a byte
    scales: Tensor  # O x 1; nf4: O x 2, the least of a row's blocks and the step from there
    levels_OK: Tensor | None = None  # nf4: how many steps each block is above the least


def pack(kind: Kind, weight_OI: Tensor) -> Packed:
    """The nearest packed form of a weight of any float dtype. Each row is packed by itself."""
    packed = _empty(kind, weight_OI)
    if weight_OI.is_meta:
        return packed
    rows = max(1, PACKED_AT_ONCE // packed.inputs)
    for first in range(0, len(weight_OI), rows):
        part = _pack_rows(kind, weight_OI[first : first + rows].float())
        packed.codes_OP[first : first + rows] = part.codes_OP
        packed.scales[first : first + rows] = part.scales
        if packed.levels_OK is not None and part.levels_OK is not None:
            packed.levels_OK[first : first + rows] = part.levels_OK
    return packed


def _empty(kind: Kind, weight_OI: Tensor) -> Packed:
    outputs, inputs = weight_OI.shape

    def place(width: int, dtype: torch.dtype) -> Tensor:
        return weight_OI.new_empty((outputs, width), dtype=dtype)

    if kind == "nf4":
        blocks = -(-inputs // BLOCK)
        codes_OP, levels_OK = place(blocks * BLOCK // 2, torch.uint8), place(blocks, torch.uint8)
        return Packed(kind, inputs, codes_OP, place(2, torch.float32), levels_OK)
    codes_OI = place(inputs, torch.int8 if kind == "int8" else torch.uint8)
    return Packed(kind, inputs, codes_OI, place(1, torch.float32))


def _pack_rows(kind: Kind, weight_OI: Tensor) -> Packed:
    if kind == "nf4":
        return _pack_nf4(weight_OI)
    scales_O1 = weight_OI.abs().amax(1, keepdim=True) / (INT8_MOST if kind == "int8" else FP8_MOST)
    scaled_OI = weight_OI / scales_O1.clamp_min(LEAST)
    if kind == "int8":
        codes_OI = scaled_OI.round_().to(torch.int8)
    else:  # as bytes: what moves tensors about need not know of float8
        codes_OI = scaled_OI.to(torch.float8_e4m3fn).view(torch.uint8)
    return Packed(kind, weight_OI.shape[1], codes_OI, scales_O1)


def _pack_nf4(weight_OI: Tensor) -> Packed:
    blocks_OKB = pad(weight_OI, (0, -weight_OI.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    largest_OK = blocks_OKB.abs().amax(2)
    levels = _levels(weight_OI.device)
    halfway = (levels[1:] + levels[:-1]) / 2
    nearest = torch.bucketize(blocks_OKB / largest_OK.clamp_min(LEAST)[..., None], halfway, out_int32=True)
    high, low = nearest.to(torch.uint8).flatten(1).unflatten(1, (-1, 2)).unbind(2)
    least_O1, most_O1 = largest_OK.aminmax(dim=1, keepdim=True)
    step_O1 = (most_O1 - least_O1) / 255
    levels_OK = ((largest_OK - least_O1) / step_O1.clamp_min(LEAST)).round_().to(torch.uint8)
    return Packed(
        "nf4", weight_OI.shape[1], high << 4 | low, torch.cat([least_O1, step_O1], dim=1), levels_OK
    )


def unpack(packed: Packed, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`, rounded once."""
    codes_OP, scales, inputs = packed.codes_OP, packed.scales, packed.inputs
    if packed.levels_OK is not None:
        scales = scales[:, :1] + scales[:, 1:] * packed.levels_OK
        if dtype in KERNEL_DTYPES and nf4_path(codes_OP.device).path == "bitsandbytes":
            return _unpack_by_kernel(codes_OP, scales, dtype)[:, :inputs]
    elif packed.kind == "fp8":
        codes_OP = codes_OP.view(torch.float8_e4m3fn)
    weight_OI = scales.new_empty((len(codes_OP), inputs), dtype=dtype)
    rows = max(1, UNPACKED_AT_ONCE // inputs)
    for out_RI, codes_RP, scales_R in zip(
        weight_OI.split(rows), codes_OP.split(rows), scales.split(rows), strict=True
    ):
        if packed.kind == "nf4":
            out_RI.copy_(_unpack_nf4(codes_RP, scales_R)[:, :inputs])
        else:
            out_RI.copy_(codes_RP).mul_(scales_R)  # the copy is exact: there is one rounding
    return weight_OI


def _unpack_nf4(codes_OP: Tensor, largest_OK: Tensor) -> Tensor:
    """By definition: two levels a byte, times the largest of their block."""
    levels_OP2 = embedding(codes_OP.int(), _pairs(codes_OP.device))
    return levels_OP2.view(*largest_OK.shape, BLOCK).mul_(largest_OK[..., None]).flatten(1)


def _unpack_by_kernel(codes_OP: Tensor, largest_OK: Tensor, dtype: torch.dtype) -> Tensor:
    """By bitsandbytes, in one pass."""
    from bitsandbytes import functional  # pyright: ignore[reportMissingImports]

    state = functional.QuantState(
        absmax=largest_OK.flatten(),
        shape=torch.Size((len(codes_OP), largest_OK.shape[1] * BLOCK)),
        code=_levels(codes_OP.device),
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=dtype,
    )
    return functional.dequantize_4bit(codes_OP.reshape(-1, 1), state)


@cache
def nf4_path(device: torch.device) -> Choice:
    """What unpacks nf4 on a device: bitsandbytes if it is installed and equals the definition."""
    name, plain = "nf4", "PyTorch"
    if find_spec("bitsandbytes") is None:
        return Choice(name, plain, "no bitsandbytes, whose kernel is faster: pip install bitsandbytes")
    if find_spec("kernels") is not None:
        return Choice(name, plain, "bitsandbytes would run code from the network (package `kernels`)")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of kernels that are not used here
    codes_OP = torch.arange(256, dtype=torch.uint8, device=device).view(2, -1)
    largest_OK = torch.arange(1.0, 9.0, device=device).view(2, -1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what it imports
            theirs = _unpack_by_kernel(codes_OP, largest_OK, torch.float32)
    except (ImportError, OSError, RuntimeError) as error:  # no library for this device, or a broken one
        return Choice(name, plain, f"bitsandbytes does not run here: {str(error).strip().splitlines()[0]}")
    if not torch.equal(theirs, _unpack_nf4(codes_OP, largest_OK)):
        return Choice(name, plain, "bitsandbytes gives other numbers than the definition")
    return Choice(name, "bitsandbytes", "its kernel gives the definition's numbers in one pass")


@cache
def _levels(device: torch.device) -> Tensor:
    return torch.tensor(NF4, device=device)


@cache
def _pairs(device: torch.device) -> Tensor:
    """The two levels of each byte."""
    levels = _levels(device)
    return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1)


def quantized_linear(x: Tensor, packed: Packed, bias_O: Tensor | None) -> Tensor:
    """x W^T + b in x's dtype. W and b are frozen, and of W nothing wide is kept for the backward pass."""
    parts = (packed.codes_OP, packed.scales, packed.levels_OK)
    out: Any = _Product.apply(x, bias_O, packed.kind, packed.inputs, *parts)
    return out


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias_O: Tensor | None,
        kind: Kind,
        inputs: int,
        codes_OP: Tensor,
        scales: Tensor,
        levels_OK: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(codes_OP, scales, levels_OK)
        ctx.kind, ctx.inputs = kind, inputs
        weight_OI = unpack(Packed(kind, inputs, codes_OP, scales, levels_OK), x.dtype)
        out = x.new_empty(
            (*x.shape[:-1], len(weight_OI))
        )  # not a view, so that an adapter can be added in it
        flat_SI, flat_SO = x.flatten(0, -2), out.flatten(0, -2)
        if bias_O is None:
            torch.mm(flat_SI, weight_OI.T, out=flat_SO)
        else:
            torch.addmm(bias_O, flat_SI, weight_OI.T, out=flat_SO)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        weight_OI = unpack(Packed(ctx.kind, ctx.inputs, *ctx.saved_tensors), grad.dtype)
        return grad @ weight_OI, None, None, None, None, None, None
