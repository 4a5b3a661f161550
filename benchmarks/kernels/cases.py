"""What `benchmarks.kernels.table` measures: an operator of ours, its definition and Liger-Kernel's, at sizes
of real models. To add a row, write a function that returns a Case and name it in CASES.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout

from glm_accelerate.kernels import gelu, layer_norm, rms_norm, rope, softmax, swiglu

Function = Callable[..., Tensor | tuple[Tensor, ...]]
EPSILON = 1e-5


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of GLM-4-9B, GLM-4-0414-32B and GLM-130B, or tiny and odd ones."""

    tokens: int = 8192
    width: int = 4096
    mlp: int = 13_696
    wide: int = 6144  # of the 32B
    wide_mlp: int = 23_040
    heads: int = 32
    head: int = 128
    turned: int = 64
    widest: int = 12_288  # of the 130B, whose rows have
    row: int = 2048  # tokens
    device: str = "cuda"


TINY = Sizes(9, 60, 61, 33, 65, 3, 16, 8, 129, 7, "cpu")


@dataclass(frozen=True, slots=True)
class Case:
    """One operator. `inputs` are shapes; the first `trained` of them get a gradient.

    `forward` and `backward`: the numbers that have to be read or written once, weights left out.
    """

    name: str
    inputs: tuple[tuple[int, ...], ...]
    trained: int
    mine: Function
    plain: Function
    forward: int
    backward: int
    liger: Callable[[Any], Function] | None = None  # of the module liger_kernel.ops
    judged: bool = True  # not where numbers are drawn


def norm(size: Sizes) -> Case:
    S, H = size.tokens, size.width
    return Case(
        f"norm {S} x {H}",
        ((S, H), (H,)),
        2,
        lambda x, w: rms_norm.rms_norm(x, w, EPSILON, "triton"),
        plain_norm,
        2 * S * H,
        3 * S * H,
        lambda ops: lambda x, w: ops.LigerRMSNormFunction.apply(x, w, EPSILON, 0.0, "llama", False),
    )


def plain_norm(x: Tensor, w: Tensor) -> Tensor:
    return rms_norm.rms_norm_reference(x, w, EPSILON)


def sum_norm(size: Sizes) -> Case:
    S, H = size.tokens, size.width

    def plain(x: Tensor, branch: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x + branch
        return y, plain_norm(y, w)

    def liger(ops: Any) -> Function:
        def run(x: Tensor, branch: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            out, y = ops.LigerFusedAddRMSNormFunction.apply(x, branch, w, EPSILON, 0.0, "llama", False)
            return y, out

        return run

    return Case(
        f"sum and norm {S} x {H}",
        ((S, H), (S, H), (H,)),
        3,
        lambda x, branch, w: rms_norm.sum_norm(x, branch, w, EPSILON, "triton"),
        plain,
        4 * S * H,
        4 * S * H,
        liger,
    )


def add_norm(size: Sizes) -> Case:
    S, H = size.tokens, size.width
    return Case(
        f"x + norm {S} x {H}",
        ((S, H), (S, H), (H,)),
        3,
        lambda x, branch, w: rms_norm.add_norm(x, branch, w, EPSILON, "triton"),
        lambda x, branch, w: x + plain_norm(branch, w),
        3 * S * H,
        3 * S * H,
        lambda ops: (
            lambda x, branch, w: x + ops.LigerRMSNormFunction.apply(branch, w, EPSILON, 0.0, "llama", False)
        ),
    )


def _sandwich(S: int, H: int, trained: bool) -> Case:
    def plain(x: Tensor, branch: Tensor, after: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        y = x + plain_norm(branch, after)
        return y, plain_norm(y, before)

    def liger(ops: Any) -> Function:
        def run(x: Tensor, branch: Tensor, after: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
            normed = ops.LigerRMSNormFunction.apply(branch, after, EPSILON, 0.0, "llama", False)
            out, y = ops.LigerFusedAddRMSNormFunction.apply(x, normed, before, EPSILON, 0.0, "llama", False)
            return y, out

        return run

    return Case(
        f"norm, sum and norm {S} x {H}" + ("" if trained else ", frozen weights"),
        ((S, H), (S, H), (H,), (H,)),
        4 if trained else 2,
        lambda x, branch, after, before: rms_norm.sandwich(x, branch, after, before, EPSILON, "triton"),
        plain,
        4 * S * H,
        6 * S * H,
        liger,
    )


def sandwich(size: Sizes) -> Case:
    return _sandwich(size.tokens, size.width, trained=True)


def sandwich_frozen(size: Sizes) -> Case:
    return _sandwich(size.tokens, size.width, trained=False)


def sandwich_wide(size: Sizes) -> Case:
    return _sandwich(size.tokens, size.wide, trained=True)


def _swiglu(S: int, F: int) -> Case:
    return Case(
        f"swiglu {S} x {F}",
        ((S, 2 * F),),
        1,
        lambda x: swiglu.swiglu(x, "triton"),
        swiglu.swiglu_reference,
        3 * S * F,
        5 * S * F,
        lambda ops: lambda x: ops.LigerSiLUMulFunction.apply(*x.chunk(2, -1)),
    )


def gate(size: Sizes) -> Case:
    return _swiglu(size.tokens, size.mlp)


def gate_wide(size: Sizes) -> Case:
    return _swiglu(size.tokens, size.wide_mlp)


def _positions(size: Sizes, turned: int, halves: bool) -> Case:
    S, N, D = size.tokens, size.heads, size.head
    table = rope.rope_table(torch.arange(S, device=size.device)[None], turned, 1e4)

    def liger(ops: Any) -> Function:
        narrow = table[:, :, 0].to(torch.complex64)
        cos, sin = (torch.cat((part, part), -1).bfloat16() for part in (narrow.real, narrow.imag))
        keys = torch.zeros(1, 1, S, D, dtype=torch.bfloat16, device=size.device)  # it wants some: the least

        def run(x: Tensor) -> Tensor:
            return ops.LigerRopeFunction.apply(x.transpose(1, 2), keys, cos, sin)[0].transpose(1, 2)

        return run

    return Case(
        f"rotary, {'halves' if halves else 'neighbours'}, {turned} of {D}, {S} x {N} heads",
        ((1, S, N, D),),
        1,
        lambda x: rope.rope(x, table, "triton", halves),
        lambda x: rope.rope_reference(x, table, halves),
        2 * S * N * D,
        2 * S * N * D,
        liger if halves else None,
    )


def positions(size: Sizes) -> Case:
    return _positions(size, size.turned, halves=False)


def positions_by_halves(size: Sizes) -> Case:
    return _positions(size, size.head, halves=True)


def masked_softmax(size: Sizes) -> Case:
    N, T = size.heads, size.row
    return Case(
        f"causal softmax {N} x {T} x {T}",
        ((1, N, T, T),),
        1,
        lambda x: softmax.masked_softmax(x, 0.1, form="triton"),
        lambda x: softmax.masked_softmax_reference(x, 0.1),
        N * T * (T + T // 2),
        N * T * (T + T // 2 * 2),
    )


def gelu_tanh(size: Sizes) -> Case:
    S, F = size.row, 4 * size.width
    return Case(
        f"gelu, tanh, {S} x {F}",
        ((S, F),),
        1,
        lambda x: gelu.gelu(x, "tanh", "triton"),
        lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        2 * S * F,
        3 * S * F,
    )


def _geglu(size: Sizes, shape: gelu.Shape, liger: Callable[[Any], Function] | None) -> Case:
    S, F = size.row, 8 * size.width
    return Case(
        f"geglu, {'tanh' if shape == 'tanh' else 'erf'}, {S} x {F}",
        ((S, 2 * F),),
        1,
        lambda x: gelu.geglu(x, shape, "triton"),
        lambda x: x.chunk(2, -1)[0] * torch.nn.functional.gelu(x.chunk(2, -1)[1], approximate=shape),
        3 * S * F,
        5 * S * F,
        liger,
    )


def geglu_erf(size: Sizes) -> Case:
    return _geglu(size, "none", None)


def geglu_tanh(size: Sizes) -> Case:
    return _geglu(size, "tanh", lambda ops: lambda x: ops.LigerGELUMulFunction.apply(*x.chunk(2, -1)[::-1]))


def layers(size: Sizes) -> Case:
    S, H = size.row, size.widest
    return Case(
        f"layer norm {S} x {H}",
        ((S, H), (H,), (H,)),
        3,
        lambda x, w, b: layer_norm.layer_norm(x, w, b, EPSILON, "triton"),
        lambda x, w, b: torch.nn.functional.layer_norm(x, x.shape[-1:], w, b, EPSILON),
        2 * S * H,
        3 * S * H,
        lambda ops: lambda x, w, b: ops.LigerLayerNormFunction.apply(x, w, b, EPSILON),
    )


def _deep(size: Sizes, share: float) -> Case:
    S, H, alpha = size.row, size.widest, 140**0.5

    def plain(x: Tensor, branch: Tensor, w: Tensor, b: Tensor) -> Tensor:
        total = alpha * x + dropout(branch, share)
        return torch.nn.functional.layer_norm(total, x.shape[-1:], w, b, EPSILON)

    def mine(x: Tensor, branch: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return layer_norm.deep_norm(x, branch, w, b, EPSILON, alpha=alpha, dropout=share, form="triton")

    return Case(
        f"deep norm {S} x {H}, dropout {share:g}",
        ((S, H), (S, H), (H,), (H,)),
        4,
        mine,
        plain,
        3 * S * H,
        5 * S * H,
        judged=not share,
    )


def deep(size: Sizes) -> Case:
    return _deep(size, 0.0)


def deep_dropped(size: Sizes) -> Case:
    return _deep(size, 0.1)


CASES: tuple[Callable[[Sizes], Case], ...] = (
    *(norm, sum_norm, add_norm, sandwich, sandwich_frozen, sandwich_wide, gate, gate_wide),
    *(positions, positions_by_halves, masked_softmax, gelu_tanh, geglu_erf, geglu_tanh),
    *(layers, deep, deep_dropped),
)
