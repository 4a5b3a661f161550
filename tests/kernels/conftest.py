"""Triton kernels run in its interpreter where there is no GPU, asked for before anything imports Triton. And
the judge of all kernels: at most twice plain PyTorch's error against float64, plus one ulp.
"""

import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

Function = Callable[..., Tensor | tuple[Tensor, ...]]
ON = torch.device("cuda" if torch.cuda.is_available() else "cpu")

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]  # there is no Triton for every system

if ON.type == "cpu":
    asked = os.environ.get("TRITON_INTERPRET") == "1"
    assert asked or "triton" not in sys.modules, "Triton was imported before its interpreter was asked for"
    os.environ["TRITON_INTERPRET"] = "1"


def normal(*shape: int, seed: int = 0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.double().to(ON)


def outcome(function: Function, inputs: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """What a function returns in a dtype, and every gradient of a fixed weighting of it."""
    leaves = [x.to(dtype).requires_grad_(True) for x in inputs]
    made = function(*leaves)
    outs = made if isinstance(made, tuple) else (made,)
    slopes = [normal(*out.shape, seed=90 + place).to(out.dtype) for place, out in enumerate(outs)]
    return [*(out.detach() for out in outs), *torch.autograd.grad(outs, leaves, slopes)]


def judge_in(mine: Function, plain: Function, inputs: Sequence[Tensor], dtype: torch.dtype) -> None:
    rounded = [x.to(dtype).double() for x in inputs]  # rounding them is nobody's error
    exact = outcome(plain, rounded, torch.float64)
    found, others = outcome(mine, rounded, dtype), outcome(plain, rounded, dtype)
    for place, (value, other, truth) in enumerate(zip(found, others, exact, strict=True)):
        assert value.dtype == other.dtype
        ulp = torch.finfo(value.dtype).eps * truth.abs().max().item()
        error, allowed = ((each.double() - truth).abs().max().item() for each in (value, other))
        assert error <= 2 * allowed + ulp, f"number {place}: {error:.3g}, plain PyTorch {allowed:.3g}"


@pytest.fixture
def judge() -> Callable[[Function, Function, Sequence[Tensor]], None]:
    """judge(mine, plain, inputs): forward and every gradient; in bfloat16 too where kernels really run."""

    def in_each(mine: Function, plain: Function, inputs: Sequence[Tensor]) -> None:
        for dtype in (torch.float32, torch.bfloat16) if ON.type == "cuda" else (torch.float32,):
            judge_in(mine, plain, inputs, dtype)

    return in_each


@pytest.fixture
def numbers() -> Callable[..., Tensor]:
    """numbers(*shape, seed=0): normal ones in float64, where kernels run."""
    return normal
