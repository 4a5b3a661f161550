"""Norms and the sums around them as Triton kernels, by the house rule."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from glm_accelerate.kernels.rms_norm import add_norm, rms_norm, rms_norm_reference, sandwich, sum_norm

EPSILON = 1e-5
SHAPES = [(11, 7), (2, 9, 60), (3, 1, 129)]  # none is a power of two


def plain_norm(x: Tensor, w: Tensor) -> Tensor:
    return rms_norm_reference(x, w, EPSILON)


@pytest.mark.parametrize("shape", SHAPES)
def test_norm(shape: tuple[int, ...], judge: Callable[..., None], numbers: Callable[..., Tensor]) -> None:
    inputs = [numbers(*shape), numbers(shape[-1], seed=1)]
    judge(lambda x, w: rms_norm(x, w, EPSILON, "triton"), plain_norm, inputs)


@pytest.mark.parametrize("shape", SHAPES)
def test_add_norm(shape: tuple[int, ...], judge: Callable[..., None], numbers: Callable[..., Tensor]) -> None:
    inputs = [numbers(*shape), numbers(*shape, seed=1) * 3, numbers(shape[-1], seed=2)]
    judge(
        lambda x, branch, w: add_norm(x, branch, w, EPSILON, "triton"),
        lambda x, branch, w: x + plain_norm(branch, w),
        inputs,
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_sum_norm(shape: tuple[int, ...], judge: Callable[..., None], numbers: Callable[..., Tensor]) -> None:
    def plain(x: Tensor, branch: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x + branch, plain_norm(x + branch, w)

    inputs = [numbers(*shape), numbers(*shape, seed=1), numbers(shape[-1], seed=2)]
    judge(lambda x, branch, w: sum_norm(x, branch, w, EPSILON, "triton"), plain, inputs)


@pytest.mark.parametrize("shape", SHAPES)
def test_sandwich(shape: tuple[int, ...], judge: Callable[..., None], numbers: Callable[..., Tensor]) -> None:
    def plain(x: Tensor, branch: Tensor, after: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        y = x + plain_norm(branch, after)
        return y, plain_norm(y, before)

    weights = [numbers(shape[-1], seed=2), numbers(shape[-1], seed=3)]
    judge(
        lambda x, branch, after, before: sandwich(x, branch, after, before, EPSILON, "triton"),
        plain,
        [numbers(*shape), numbers(*shape, seed=1) * 3, *weights],
    )


def test_rows_may_lie_apart_and_inputs_stay_as_they_are(numbers: Callable[..., Tensor]) -> None:
    """As slices of a wider matrix do; slopes that one number makes have no stride at all."""
    wide, weight = numbers(5, 40).float(), numbers(16, seed=1).float()
    before = wide.clone()
    found: list[Tensor] = []
    for x in (wide[:, 3:19], wide[:, 3:19].contiguous(), wide.T[3:19].T):
        leaf = x.detach().requires_grad_(True)
        y, out = sandwich(leaf, leaf * 2, weight, weight, EPSILON, "triton")
        (y.sum() + out.sum()).backward()
        assert leaf.grad is not None
        found.append(torch.cat((y.detach(), out.detach(), leaf.grad)))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert torch.equal(wide, before)


def test_frozen_weights_get_no_gradient_and_change_nothing(numbers: Callable[..., Tensor]) -> None:
    """With LoRA: the other form of the backward kernel, a program a row."""
    x, branch = numbers(7, 60).float(), numbers(7, 60, seed=1).float()
    found: list[Tensor] = []
    for trained in (True, False):
        leaves = [each.clone().requires_grad_(True) for each in (x, branch)]
        weights = [numbers(60, seed=seed).float().requires_grad_(trained) for seed in (2, 3)]
        y, out = sandwich(*leaves, *weights, EPSILON, "triton")
        (y * x + out * branch).sum().backward()
        assert [weight.grad is not None for weight in weights] == [trained, trained]
        found.append(torch.cat([leaf.grad for leaf in leaves if leaf.grad is not None]))
    assert torch.equal(*found)


def test_no_rows(numbers: Callable[..., Tensor]) -> None:
    x, weight = torch.zeros(0, 60, requires_grad=True), torch.ones(60, requires_grad=True)
    rms_norm(x, weight, EPSILON, "triton").sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().max() == 0
