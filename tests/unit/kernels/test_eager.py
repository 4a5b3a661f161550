"""The eager forms of operators that GLM-130B, ChatGLM-6B and GLM-4.5 need, by the house rule."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from glm_accelerate.kernels import gelu, layer_norm, rms_norm, rope, softmax

DTYPES = [torch.float32, torch.bfloat16]


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Numbers that bfloat16 holds, so that rounding them is nobody's error."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().double()


def outcome(function: Callable[..., Tensor], inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    leaves = [x.to(dtype).requires_grad_(True) for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, normal(*out.shape, seed=9).to(out.dtype))]


def judge(
    mine: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: list[Tensor], dtype: torch.dtype
) -> None:
    """err(mine) <= 2 err(plain) + 1 ulp of the largest value, forward and every gradient."""
    exact = outcome(plain, inputs, torch.float64)
    found, others = outcome(mine, inputs, dtype), outcome(plain, inputs, dtype)
    for value, other, truth in zip(found, others, exact, strict=True):
        assert value.dtype == dtype
        ulp = torch.finfo(dtype).eps * truth.abs().max().item()
        error = (value.double() - truth).abs().max().item()
        assert error <= 2 * (other.double() - truth).abs().max().item() + ulp


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["tanh", "none"])
def test_gelu_and_geglu(dtype: torch.dtype, shape: gelu.Shape) -> None:
    inputs = [normal(2, 33, 122) * 2]
    judge(lambda x: gelu.gelu(x, shape), lambda x: gelu.gelu_reference(x, shape), inputs, dtype)
    judge(lambda x: gelu.geglu(x, shape), lambda x: gelu.geglu_reference(x, shape), inputs, dtype)


def test_geglu_activates_the_second_half() -> None:
    x = normal(3, 10)
    assert torch.allclose(gelu.geglu(x), x[:, :5] * torch.nn.functional.gelu(x[:, 5:]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_masked_softmax(dtype: torch.dtype, causal: bool, padded: bool) -> None:
    seen = torch.ones(2, 9, dtype=torch.bool)
    seen[1, :6] = False
    mask = seen if padded else None
    judge(
        lambda x: softmax.masked_softmax(x, 0.3, causal=causal, keys_BS=mask),
        lambda x: softmax.masked_softmax_reference(x, 0.3, causal=causal, keys_BS=mask),
        [normal(2, 3, 7, 9) * 2],
        dtype,
    )


def test_masked_softmax_sees_what_it_should() -> None:
    """The last query sees all keys, the first of 3 sees 5 - 2; padding is never seen; shares add up to 1."""
    keys = torch.tensor([[False, True, True, True, True]])
    out = softmax.masked_softmax(normal(1, 1, 3, 5), 1.0, keys_BS=keys)[0, 0]
    assert (out > 0).tolist() == [
        [False, True, True, False, False],
        [False, True, True, True, False],
        [False, True, True, True, True],
    ]
    assert torch.allclose(out.sum(-1), torch.ones(3, dtype=torch.float64))
    nothing = softmax.masked_softmax(normal(1, 1, 3, 5), 1.0, keys_BS=torch.zeros(1, 5, dtype=torch.bool))
    assert nothing.abs().max() == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_and_deep_norm(dtype: torch.dtype) -> None:
    weights = [normal(60, seed=1), normal(60, seed=2)]
    x, branch = normal(2, 33, 60) * 2 + 1, normal(2, 33, 60, seed=3)
    judge(
        lambda x, w, b: layer_norm.layer_norm(x, w, b, 1e-5),
        lambda x, w, b: layer_norm.layer_norm_reference(x, w, b, 1e-5),
        [x, *weights],
        dtype,
    )
    judge(
        lambda x, branch, w, b: layer_norm.deep_norm(x, branch, w, b, 1e-5, alpha=3.0),
        lambda x, branch, w, b: layer_norm.layer_norm_reference(3.0 * x + branch, w, b, 1e-5),
        [x, branch, *weights],
        dtype,
    )


def test_dropout_of_deep_norm_is_of_the_branch_alone() -> None:
    x, branch = normal(50, 60).float(), torch.zeros(50, 60, requires_grad=True)
    torch.manual_seed(0)
    out = layer_norm.deep_norm(x, branch, torch.ones(60), torch.zeros(60), 1e-5, alpha=2.0, dropout=0.3)
    assert torch.allclose(
        out, layer_norm.layer_norm_reference(x, torch.ones(60), torch.zeros(60), 1e-5), atol=1e-5
    )
    (slope,) = torch.autograd.grad((out * normal(50, 60, seed=1).float()).sum(), branch)
    assert (slope == 0).float().mean().item() == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_norm(dtype: torch.dtype) -> None:
    def mine(x: Tensor, branch: Tensor, w: Tensor) -> Tensor:
        return torch.cat(rms_norm.sum_norm(x, branch, w, 1e-5), -1)

    def plain(x: Tensor, branch: Tensor, w: Tensor) -> Tensor:
        y = x + branch
        return torch.cat((y, rms_norm.rms_norm_reference(y, w, 1e-5)), -1)

    judge(mine, plain, [normal(2, 33, 60), normal(2, 33, 60, seed=1), normal(60, seed=2)], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_by_halves(dtype: torch.dtype) -> None:
    table = rope.rope_table(torch.tensor([[0, 1, 2, 0, 700]]), 6, 1e4)
    x = normal(1, 5, 3, 10)
    judge(
        lambda x: rope.rope(x, table, halves=True), lambda x: rope.rope_reference(x, table, True), [x], dtype
    )
    turned = rope.rope(x, table, halves=True)
    angle = 2 * 1e4 ** (-2 / 6)  # of pair 1 at position 2
    one, two = x[0, 2, :, 1], x[0, 2, :, 4]
    assert torch.allclose(turned[0, 2, :, 1], one * math.cos(angle) - two * math.sin(angle), atol=1e-6)
    assert torch.equal(turned[..., 6:], x[..., 6:])
