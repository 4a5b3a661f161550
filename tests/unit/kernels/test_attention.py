"""Attention by document in float16, by the house rule. The other dtypes are in test_kernels.py."""

import pytest
import torch
from torch import Tensor

from glm_accelerate.kernels.attention import attend_slots, attention, attention_reference, unseen


def drawn(*shape: int, seed: int) -> Tensor:
    """Numbers that float16 holds, as float64: rounding them is nobody's error."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half().double()


def leaves(inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [x.to(dtype).requires_grad_(True) for x in inputs]


def judged(mine: list[Tensor], plain: list[Tensor], exact: list[Tensor]) -> None:
    """err(mine) <= 2 err(plain) + 1 ulp of the largest value."""
    for value, other, truth in zip(mine, plain, exact, strict=True):
        assert value.dtype == torch.float16
        ulp = torch.finfo(torch.float16).eps * truth.abs().max().item()
        error = (value.double() - truth).abs().max().item()
        assert error <= 2 * (other.double() - truth).abs().max().item() + ulp


@pytest.mark.parametrize("tiles", [None, (1, 30, 129, 5), (310, 4)])
def test_documents(tiles: tuple[int, ...] | None) -> None:
    T = sum(tiles or (41,))
    inputs = [drawn(1, T, heads, 16, seed=seed) for seed, heads in enumerate((6, 2, 2))]
    slope = drawn(1, T, 6, 16, seed=9)
    found: list[list[Tensor]] = []
    for function, dtype in (
        (attention, torch.float16),
        (attention_reference, torch.float16),
        (attention_reference, torch.float64),
    ):
        given = leaves(inputs, dtype)
        out = function(*given, tiles)  # pyright: ignore[reportCallIssue]
        found.append([out.detach(), *torch.autograd.grad(out, given, slope.to(dtype))])
    judged(*found)


def test_prefix() -> None:
    """Of float32, as it is trained, before float16 documents."""
    tiles, T = (4, 1, 7), 12
    inputs = [drawn(1, T, heads, 16, seed=seed) for seed, heads in enumerate((6, 2, 2))]
    before = [drawn(2, 3, 16, seed=seed) for seed in (3, 4)]
    half = attention(*(x.half() for x in inputs), tiles, (before[0].float(), before[1].float()))
    exact = attention(*inputs, tiles, (before[0], before[1]))
    assert half.dtype == torch.float16
    assert (half.double() - exact).abs().max() < 4e-3


def test_cache() -> None:
    q, k, v = drawn(3, 1, 6, 8, seed=0), drawn(3, 10, 2, 8, seed=1), drawn(3, 10, 2, 8, seed=2)
    lengths, (k, v) = torch.tensor([10, 1, 7]), (x.transpose(1, 2) for x in (k, v))
    half = attend_slots(q.half(), k.half(), v.half(), unseen(lengths, 10, torch.float16))
    assert half.dtype == torch.float16
    assert (half.double() - attend_slots(q, k, v, unseen(lengths, 10, q.dtype))).abs().max() < 4e-3
