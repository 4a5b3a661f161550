"""Attention by document in float16, by the house rule. The other dtypes are in test_kernels.py."""

from collections.abc import Sequence

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


def by_definition(
    q_SND: Tensor, k_SKD: Tensor, v_SKD: Tensor, lengths: Sequence[int], keys: Sequence[int]
) -> Tensor:
    """Each document's queries are the last of as many as it has keys."""
    parts: list[Tensor] = []
    for q, k, v in zip(q_SND.split(lengths), k_SKD.split(keys), v_SKD.split(keys), strict=True):
        whole = torch.cat((q.new_zeros(len(k) - len(q), *q.shape[1:]), q))
        parts.append(attention_reference(whole[None], k[None], v[None], None)[0, -len(q) :])
    return torch.cat(parts)


@pytest.mark.parametrize(("lengths", "keys"), [((3, 1, 9), (5, 7, 9)), ((300, 20), (310, 20))])
def test_pieces_see_the_keys_before_them(lengths: tuple[int, ...], keys: tuple[int, ...]) -> None:
    """Of more queries than one mask is made for, too."""
    q, slope = drawn(sum(lengths), 6, 16, seed=0), drawn(1, sum(lengths), 6, 16, seed=9)
    given = [x.requires_grad_() for x in (q, *(drawn(sum(keys), 2, 16, seed=seed) for seed in (1, 2)))]
    mine = attention(*(x[None] for x in given), lengths, None, keys)
    exact = by_definition(*given, lengths, keys)[None]
    torch.testing.assert_close(mine, exact)
    for own, true in zip(*(torch.autograd.grad(out, given, slope) for out in (mine, exact)), strict=True):
        torch.testing.assert_close(own, true)


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
