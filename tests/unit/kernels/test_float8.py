"""8-bit products against their definition, on the CPU's own 8-bit product, forward and both gradients."""

from typing import Literal

import pytest
import torch
from torch import Tensor

from glm_accelerate.kernels import compiled
from glm_accelerate.kernels.float8 import (
    E4M3,
    eight,
    float8_linear,
    missing,
    product,
    product_reference,
    rounded_columns,
    rounded_rows,
)
from glm_accelerate.runtime.devices.record import Cpu

ROUNDING = 2.0**-4  # half of the distance between neighbours, as a share of a number: 3 bits behind the point


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("each", "along"), [("row", 1), ("column", 0)])
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_each_row_or_column_comes_back_within_its_digits(
    each: Literal["row", "column"], along: int, size: float
) -> None:
    x = drawn(65, 33) * size
    x[3] *= 1e-6  # of which one scale for all would leave nothing
    made = eight(x, each)
    assert made.number.dtype == E4M3
    back = made.number.float() * made.scale
    top = x.abs().amax(along, keepdim=True)
    assert torch.allclose(back.abs().amax(along, keepdim=True), top, rtol=1e-6)  # the largest is exact
    large = x.abs() > top * 1e-3  # smaller ones have fewer digits
    assert ((back - x).abs() <= ROUNDING * x.abs() * 1.001)[large].all()


def test_zeros_and_what_is_not_finite() -> None:
    zeros = eight(torch.zeros(16, 16), "row")
    assert not zeros.number.float().any()
    assert (zeros.scale > 0).all()
    spoilt = drawn(16, 16)
    spoilt[3, 4] = float("inf")
    out = float8_linear(spoilt, drawn(16, 16), None, simulated=True)
    assert not out[3].isfinite().all()  # an overflow is not hidden
    assert out[:3].isfinite().all()  # and stays where it is


@pytest.mark.parametrize("simulated", [True, False])
def test_a_token_does_not_depend_on_its_neighbours(simulated: bool) -> None:
    """Neither what it becomes nor its gradient: documents share a pass."""
    weight = drawn(32, 48, seed=1)
    found: list[tuple[Tensor, Tensor]] = []
    for scale in (1.0, 1000.0):
        x, slope = drawn(16, 48), drawn(16, 32, seed=2)
        x[:8] *= scale
        slope[:8] *= scale
        x.requires_grad_()
        out = float8_linear(x, weight, None, simulated=simulated)
        (grad,) = torch.autograd.grad(out, x, slope)
        found.append((out.detach(), grad))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one[8:], other[8:])
        assert not torch.equal(one[:8], other[:8])


@pytest.mark.parametrize(("S", "I", "O"), [(16, 32, 48), (5, 16, 16), (33, 48, 32), (1, 64, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_that_of_the_reference(S: int, I: int, O: int, dtype: torch.dtype) -> None:
    left, right = eight(drawn(S, I), "row"), eight(drawn(O, I, seed=1), "row").T
    found, expected = (f(left, right, dtype).float() for f in (product, product_reference))
    tolerance = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert torch.allclose(found, expected, rtol=tolerance, atol=1e-5)


def test_a_product_with_a_scale_for_each_row_is_called_as_torch_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's own 8-bit product on the CPU checks types and shapes, and takes such scales too."""
    monkeypatch.setattr(Cpu, "capability", lambda _: (9, 0))
    left, right = eight(drawn(33, 48), "row"), eight(drawn(32, 48, seed=1), "row").T
    found, expected = (f(left, right, torch.bfloat16).float() for f in (product, product_reference))
    assert torch.allclose(found, expected, rtol=2 * torch.finfo(torch.bfloat16).eps, atol=1e-5)


@pytest.mark.parametrize("rows", [(32,), (3, 7), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_passes_are_those_of_the_reference(rows: tuple[int, ...], dtype: torch.dtype) -> None:
    found: list[list[Tensor]] = []
    for simulated in (False, True):
        x = drawn(*rows, 48).to(dtype).requires_grad_()
        weight, bias = drawn(32, 48, seed=1).requires_grad_(), drawn(32, seed=2).requires_grad_()
        out = float8_linear(x, weight, bias, simulated=simulated)
        assert out.dtype == dtype
        out.backward(drawn(*rows, 32, seed=3).to(dtype))
        assert x.grad is not None
        assert weight.grad is not None
        assert bias.grad is not None
        assert (x.grad.dtype, weight.grad.dtype) == (dtype, torch.float32)
        found.append([out.detach(), x.grad, weight.grad, bias.grad])
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one.float(), other.float(), rtol=tolerance, atol=tolerance)


def test_against_exact_products_the_error_is_that_of_the_digits() -> None:
    """In the mean over a long sum: rounding errors of 1/16 and 1/16 at most, which mostly cancel."""
    x, weight, slope = drawn(64, 512), drawn(128, 512, seed=1), drawn(64, 128, seed=2)
    x.requires_grad_(), weight.requires_grad_()
    exact = x @ weight.T
    made = float8_linear(x, weight, None, simulated=True)
    exact_grads = torch.autograd.grad(exact, (x, weight), slope)
    grads = torch.autograd.grad(made, (x, weight), slope)
    for found, expected in zip((made, *grads), (exact, *exact_grads), strict=True):
        share = (found - expected).norm() / expected.norm()
        assert 0.005 < share < 0.08


def test_a_frozen_weight_keeps_no_activations() -> None:
    x, weight = drawn(8, 32).requires_grad_(), drawn(16, 32)
    out = float8_linear(x, weight, None, simulated=True)
    kept = out.grad_fn.saved_tensors  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    assert [each.data_ptr() for each in kept] == [weight.data_ptr()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU lacks")
def test_what_is_missing_is_said() -> None:
    assert missing() == "there is no GPU"


@pytest.mark.skipif(bool(compiled.missing("cpu")), reason="there is no C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
def test_compiled_rounding_is_the_same() -> None:
    """As a GPU does it, for matrices of any size, with few compilations."""
    before = compiled.compilations()
    for rows, columns in ((64, 10), (17, 48), (409, 33)):
        x = drawn(rows, columns).bfloat16()
        for body in (rounded_rows, rounded_columns):
            number, scale = compiled.run(body, x, lengths={0: (0, 1)})
            expected, expected_scale = body(x)
            assert torch.equal(scale, expected_scale)
            assert torch.equal(number.view(torch.uint8), expected.view(torch.uint8))
    assert compiled.compilations() - before == 2
