"""LayerNorm, and DeepNorm's sum before it with dropout, as Triton kernels by the house rule."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from glm_accelerate.kernels.layer_norm import deep_norm, layer_norm, layer_norm_reference

EPSILON, ALPHA = 1e-5, 140**0.5
SHAPES = [(11, 7), (2, 9, 60), (3, 1, 129)]


@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm(
    shape: tuple[int, ...], judge: Callable[..., None], numbers: Callable[..., Tensor]
) -> None:
    inputs = [numbers(*shape) * 2 + 1, numbers(shape[-1], seed=1), numbers(shape[-1], seed=2)]
    judge(
        lambda x, w, b: layer_norm(x, w, b, EPSILON, "triton"),
        lambda x, w, b: layer_norm_reference(x, w, b, EPSILON),
        inputs,
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_deep_norm(
    shape: tuple[int, ...], dropout: float, judge: Callable[..., None], numbers: Callable[..., Tensor]
) -> None:
    def mine(x: Tensor, branch: Tensor, w: Tensor, b: Tensor) -> Tensor:
        torch.manual_seed(3)
        return deep_norm(x, branch, w, b, EPSILON, alpha=ALPHA, dropout=dropout, form="triton")

    keep = mask(shape, dropout, numbers) / (1 - dropout)

    def plain(x: Tensor, branch: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return layer_norm_reference(ALPHA * x + branch * keep.to(x.dtype), w, b, EPSILON)

    weights = [numbers(shape[-1], seed=2), numbers(shape[-1], seed=3)]
    judge(mine, plain, [numbers(*shape), numbers(*shape, seed=1) * 3, *weights])


def mask(shape: tuple[int, ...], dropout: float, numbers: Callable[..., Tensor]) -> Tensor:
    """Which numbers stay, as the slope of a sum along one direction shows: those of the others are zero."""
    device = numbers(1).device
    leaf = torch.zeros(shape, device=device).requires_grad_(True)
    w, b = torch.ones(shape[-1], device=device), torch.zeros(shape[-1], device=device)
    torch.manual_seed(3)
    x = numbers(*shape, seed=7).float()
    out = deep_norm(x, leaf, w, b, EPSILON, alpha=ALPHA, dropout=dropout, form="triton")
    (slope,) = torch.autograd.grad(out, leaf, numbers(*shape, seed=8).float())
    return (slope != 0).double()


def test_dropout_keeps_its_share_and_follows_the_seed(numbers: Callable[..., Tensor]) -> None:
    kept = mask((40, 129), 0.3, numbers)
    assert kept.mean().item() == pytest.approx(0.7, abs=0.03)
    assert torch.equal(kept, mask((40, 129), 0.3, numbers))
    assert abs(torch.corrcoef(kept[:, :2].T)[0, 1].item()) < 0.5
    assert mask((40, 129), 0.0, numbers).min() == 1


def test_frozen_weights_change_nothing_else(numbers: Callable[..., Tensor]) -> None:
    x, branch, w, b = (numbers(*shape, seed=9).float() for shape in ((7, 60), (7, 60), (60,), (60,)))
    found: list[Tensor] = []
    for trained in (True, False):
        leaves = [each.clone().requires_grad_(True) for each in (x, branch)]
        weights = [each.clone().requires_grad_(trained) for each in (w, b)]
        out = deep_norm(leaves[0], leaves[1], *weights, EPSILON, alpha=ALPHA, form="triton")
        (out * branch).sum().backward()
        assert [each.grad is not None for each in weights] == [trained, trained]
        found.append(torch.cat([leaf.grad for leaf in leaves if leaf.grad is not None]))
    assert torch.equal(*found)
