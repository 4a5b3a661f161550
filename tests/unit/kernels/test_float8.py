"""8-bit products against their definition, on the CPU's own 8-bit product, forward and both gradients."""

import pytest
import torch
from torch import Tensor

from glm_accelerate.kernels import compiled
from glm_accelerate.kernels.float8 import (
    BACKWARD,
    FORWARD,
    eight,
    float8_linear,
    missing,
    product,
    product_reference,
    rounded,
)

# Half of the distance between neighbours, as a share of a number: 3 and 2 bits behind the point.
ROUNDING = {FORWARD: 2.0**-4, BACKWARD: 2.0**-3}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [FORWARD, BACKWARD])
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_a_tensor_comes_back_within_its_digits(dtype: torch.dtype, size: float) -> None:
    x = drawn(65, 33) * size
    made = eight(x, dtype)
    back = made.number.float() * made.scale
    assert made.number.dtype == dtype
    assert back.abs().max().item() == pytest.approx(x.abs().max().item(), rel=1e-6)  # the largest is exact
    large = x.abs() > x.abs().max() * 1e-3  # smaller ones have fewer digits
    assert ((back - x).abs() <= ROUNDING[dtype] * x.abs() * 1.001)[large].all()


def test_zeros_and_what_is_not_finite() -> None:
    zeros = eight(torch.zeros(16, 16), FORWARD)
    assert not zeros.number.float().any()
    assert zeros.scale > 0
    spoilt = drawn(16, 16)
    spoilt[3, 4] = float("inf")
    out = float8_linear(spoilt, drawn(16, 16), None, simulated=True)
    assert not out.isfinite().all()  # an overflow is not hidden


@pytest.mark.parametrize(("S", "I", "O"), [(16, 32, 48), (5, 16, 16), (33, 48, 32), (1, 64, 16)])
def test_the_product_is_that_of_the_reference(S: int, I: int, O: int) -> None:
    left, right = eight(drawn(S, I), FORWARD), eight(drawn(O, I, seed=1), FORWARD)
    found, expected = (f(left, right.T, torch.float32) for f in (product, product_reference))
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


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
    assert sum(each.nbytes for each in kept if each.dtype == FORWARD and each.shape != weight.shape) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU lacks")
def test_what_is_missing_is_said() -> None:
    assert missing() == "there is no GPU"


@pytest.mark.skipif(bool(compiled.missing("cpu")), reason="there is no C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
def test_compiled_rounding_is_the_same() -> None:
    """As a GPU does it, for any length, with one compilation for each type of numbers."""
    before = compiled.compilations()
    for length in (640, 17, 4099):
        flat = drawn(length).bfloat16()
        number, scale = compiled.run(rounded, flat, FORWARD, lengths={0: (0,)})
        expected, expected_scale = rounded(flat, FORWARD)
        assert scale == expected_scale
        assert torch.equal(number.view(torch.uint8), expected.view(torch.uint8))
    assert compiled.compilations() - before == 1
