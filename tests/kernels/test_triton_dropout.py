"""Dropout from a seed: the same mask in both passes, none kept, and LoRA's gradients with it."""

import pytest
import torch
from torch import Tensor

from glm_accelerate.kernels import linear
from glm_accelerate.kernels.dropout import Seeded
from glm_accelerate.kernels.triton_dropout import dropped


@pytest.mark.parametrize("count", [1, 7, 8, 2049, 300 * 61])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_seed_is_a_mask(count: int, dtype: torch.dtype) -> None:
    x = torch.rand(count, dtype=dtype) + 1
    found = dropped(x, 5, 0.25)
    assert torch.equal(found, dropped(x, 5, 0.25))
    assert ((found == 0) | (found == x)).all()
    added = dropped(x, 5, 0.25, into=torch.ones_like(x))
    assert torch.equal(added, (1 + found.float()).to(dtype))


def test_shares_and_independence() -> None:
    """Each of the eight places of a draw drops its share, and neighbours and seeds are independent."""
    ones = torch.ones(1 << 18)
    first, second = (dropped(ones, seed, 0.25) == 0 for seed in (1, 2))
    assert ((first.view(-1, 8).float().mean(0) - 0.25).abs() < 0.01).all()
    together = torch.stack([first[:-1] & first[1:], first[:-1] & second[:-1]]).float().mean(1)
    assert ((together - 0.0625).abs() < 0.003).all()


def test_lora_keeps_a_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against autograd with the mask that the seed stands for."""
    keep = Seeded(7, 0.25)
    monkeypatch.setattr(linear, "draw", lambda like, share: keep)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).requires_grad_(True)

    x, A, B, weight = drawn(2, 9, 60), drawn(8, 60), drawn(20, 8), drawn(20, 60).detach()
    out = linear.lora_linear(x, weight, None, A, B, scale=4.0, dropout=0.25)
    mask = dropped(torch.ones_like(x), keep.seed, keep.share)
    plain = x @ weight.T + 4.0 / 0.75 * ((x * mask) @ A.T) @ B.T
    assert torch.allclose(out, plain, atol=1e-4)
    slope = torch.randn(out.shape, generator=generator)
    for mine, theirs in zip(
        torch.autograd.grad(out, (x, A, B), slope), torch.autograd.grad(plain, (x, A, B), slope), strict=True
    ):
        assert torch.allclose(mine, theirs, atol=1e-3)
