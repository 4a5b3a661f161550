"""The gated unit and rotary positions as Triton kernels, by the house rule."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from glm_accelerate.kernels.rope import rope, rope_reference, rope_table
from glm_accelerate.kernels.swiglu import swiglu, swiglu_reference


@pytest.mark.parametrize("shape", [(1, 2), (2, 3, 122), (3, 2 * 1025)])
def test_swiglu(shape: tuple[int, ...], judge: Callable[..., None], numbers: Callable[..., Tensor]) -> None:
    judge(lambda x: swiglu(x, "triton"), swiglu_reference, [numbers(*shape) * 3])


def test_swiglu_far_out(numbers: Callable[..., Tensor]) -> None:
    """Where exp overflows float32 the gate is 0 or the identity, never NaN."""
    gate = torch.tensor([-1e4, -200.0, 0.0, 200.0, 1e4])
    x = torch.cat((gate, torch.ones(5)))[None].to(numbers(1).device).requires_grad_(True)
    with np.errstate(over="ignore"):  # the interpreter's numpy would warn
        out = swiglu(x, "triton")
        out.sum().backward()
    assert out.tolist() == [[0.0, 0.0, 0.0, 200.0, 1e4]]
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize(("heads", "width", "turned"), [(3, 16, 8), (9, 10, 6), (1, 16, 16), (2, 128, 64)])
def test_rope(
    halves: bool,
    heads: int,
    width: int,
    turned: int,
    judge: Callable[..., None],
    numbers: Callable[..., Tensor],
) -> None:
    x = numbers(2, 5, heads, width)
    positions = torch.tensor([[0, 1, 2, 0, 700], [3, 4, 5, 6, 7]], device=x.device)
    table = rope_table(positions, turned, 1e4)
    judge(lambda x: rope(x, table, "triton", halves), lambda x: rope_reference(x, table, halves), [x])


@pytest.mark.parametrize("halves", [False, True])
def test_rope_of_heads_inside_a_wider_matrix(halves: bool, numbers: Callable[..., Tensor]) -> None:
    """As queries are in ChatGLM, whose queries, keys and values come from one matrix."""
    x = numbers(1, 5, 60).float().requires_grad_(True)
    table = rope_table(torch.arange(5, device=x.device)[None], 8, 1e4)
    q = x[..., 8:40].unflatten(-1, (2, 16))
    out, truth = rope(q, table, "triton", halves), rope_reference(q, table, halves)
    assert (out - truth).abs().max() < 1e-6
    (slope,) = torch.autograd.grad(out.pow(3).sum(), x)
    (exact,) = torch.autograd.grad(truth.pow(3).sum(), x)
    assert (slope - exact).abs().max() < 1e-4
