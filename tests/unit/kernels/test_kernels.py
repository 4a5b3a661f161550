"""Each operator against float64 by the house rule: at most twice plain PyTorch's error, plus one ulp."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from glm_accelerate.kernels.attention import attend_slots, attention, attention_reference, unseen
from glm_accelerate.kernels.dropout import keep_mask
from glm_accelerate.kernels.linear import lora_linear, lora_linear_reference
from glm_accelerate.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from glm_accelerate.kernels.rms_norm import rms_norm, rms_norm_reference
from glm_accelerate.kernels.rope import rope, rope_reference, rope_table
from glm_accelerate.kernels.swiglu import swiglu, swiglu_reference


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def judged(mine: Tensor, plain: Tensor, exact: Tensor) -> None:
    """err(mine) <= 2 err(plain) + 1 ulp of the largest value."""
    ulp = torch.finfo(mine.dtype).eps * exact.abs().max().item()
    error = (mine.double() - exact).abs().max().item()
    assert error <= 2 * (plain.double() - exact).abs().max().item() + ulp


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width", "vocabulary"), [(1, 8, 17), (333, 60, 131), (130, 33, 70_001)])
def test_linear_cross_entropy(dtype: torch.dtype, rows: int, width: int, vocabulary: int) -> None:
    """Forward and both gradients; 70,001 words make several chunks of unequal size."""
    # Judged from the rounded inputs: rounding them is not the kernel's doing.
    hidden, weight = (
        x.to(dtype).double() for x in (normal(rows, width), normal(vocabulary, width, seed=1) * 0.3)
    )
    labels = torch.randint(0, vocabulary, (rows,), generator=torch.Generator().manual_seed(2))

    def run(
        function: Callable[[Tensor, Tensor, Tensor], Tensor], kind: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        h, w = (x.clone().to(kind).requires_grad_(True) for x in (hidden, weight))
        loss = function(h, w, labels) * 0.37
        loss.backward()
        assert h.grad is not None
        assert w.grad is not None
        return loss.detach(), h.grad, w.grad

    exact = run(linear_cross_entropy_reference, torch.float64)
    mine, plain = run(linear_cross_entropy, dtype), run(linear_cross_entropy_reference, dtype)
    assert mine[0].dtype == torch.float32
    for value, other, truth in zip(mine, plain, exact, strict=True):
        judged(value, other, truth)


def test_linear_cross_entropy_leaves_frozen_weights_alone() -> None:
    hidden, weight = (
        normal(9, 8, dtype=torch.float32).requires_grad_(True),
        normal(17, 8, dtype=torch.float32),
    )
    before = weight.clone()
    linear_cross_entropy(hidden, weight, torch.arange(9)).backward()
    assert weight.grad is None
    assert torch.equal(weight, before)
    with torch.no_grad():
        assert linear_cross_entropy(hidden, weight, torch.arange(9)) > 0


@pytest.mark.parametrize("tiles", [None, (1, 30, 2, 8), (41,), (20, 21)])
def test_attention_of_documents(tiles: tuple[int, ...] | None) -> None:
    q, k, v = normal(1, 41, 6, 16), normal(1, 41, 2, 16, seed=1), normal(1, 41, 2, 16, seed=2)
    leaves = [x.float().requires_grad_(True) for x in (q, k, v)]
    exact = [x.clone().requires_grad_(True) for x in (q, k, v)]
    out, truth = attention(*leaves, tiles), attention_reference(*exact, tiles)
    out.pow(2).sum().backward()
    truth.pow(2).sum().backward()
    assert (out - truth).abs().max() < 1e-5
    for mine, other in zip(leaves, exact, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert (mine.grad - other.grad).abs().max() < 1e-4


def test_attention_with_prefix_sees_it_whole() -> None:
    """Every token of every document sees all of the prefix and itself, nothing else."""
    q, k, v = normal(1, 9, 4, 8), normal(1, 9, 2, 8, seed=1), normal(1, 9, 2, 8, seed=2)
    before, before_values = normal(2, 3, 8, seed=3), normal(2, 3, 8, seed=4)
    out = attention(q, k, v, (4, 5), (before, before_values))
    for start, stop in ((0, 4), (4, 9)):
        keys = torch.cat((before.transpose(0, 1), k[0, start:stop])).repeat_interleave(2, 1)
        values = torch.cat((before_values.transpose(0, 1), v[0, start:stop])).repeat_interleave(2, 1)
        for row in range(start, stop):
            seen = 3 + row - start + 1
            scores = torch.einsum("nd,snd->ns", q[0, row], keys[:seen]) / 8**0.5
            assert torch.allclose(out[0, row], torch.einsum("ns,snd->nd", scores.softmax(-1), values[:seen]))


def test_attend_slots_ignores_what_is_not_filled() -> None:
    q, k, v = normal(3, 1, 6, 8), normal(3, 10, 2, 8, seed=1), normal(3, 10, 2, 8, seed=2)
    lengths = torch.tensor([10, 1, 7])
    out = attend_slots(q, k.transpose(1, 2), v.transpose(1, 2), unseen(lengths, 10, q.dtype))
    for row, length in enumerate(lengths.tolist()):
        keys, values = (x[row : row + 1, :length].repeat_interleave(3, 2).transpose(1, 2) for x in (k, v))
        alone = scaled_dot_product_attention(q[row : row + 1].transpose(1, 2), keys, values)
        assert torch.allclose(out[row], alone[0].transpose(0, 1))


def gradients(
    function: Callable[..., Tensor], inputs: list[Tensor], dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """What a function returns in a dtype, and the gradients of a fixed weighting of it."""
    leaves = [x.clone().to(dtype).requires_grad_(True) for x in inputs]
    out = function(*leaves)
    (out * normal(*out.shape, seed=9).to(out.dtype)).sum().backward()
    found = [leaf.grad for leaf in leaves if leaf.grad is not None]
    assert len(found) == len(leaves)
    return out.detach(), found


def judge_all(
    mine: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: list[Tensor], dtype: torch.dtype
) -> None:
    """Forward and every gradient by the house rule, from inputs that are already rounded."""
    rounded = [x.to(dtype).double() for x in inputs]
    exact_out, exact = gradients(plain, rounded, torch.float64)
    mine_out, found = gradients(mine, rounded, dtype)
    plain_out, others = gradients(plain, rounded, dtype)
    judged(mine_out, plain_out, exact_out)
    for gradient, other, truth in zip(found, others, exact, strict=True):
        judged(gradient, other, truth)


DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 7), (2, 33, 60)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    inputs = [normal(*shape), normal(shape[-1], seed=1)]
    judge_all(lambda x, w: rms_norm(x, w, 1e-5), lambda x, w: rms_norm_reference(x, w, 1e-5), inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 2), (2, 33, 122)])
def test_swiglu(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    judge_all(swiglu, swiglu_reference, [normal(*shape)], dtype)


def test_swiglu_activates_the_first_half() -> None:
    x = normal(3, 10)
    gate, up = x[:, :5], x[:, 5:]
    assert torch.allclose(swiglu(x), gate * gate.sigmoid() * up)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope(dtype: torch.dtype) -> None:
    table = rope_table(torch.tensor([[0, 1, 2, 0, 700], [3, 4, 5, 6, 7]]), 8, 1e4)
    judge_all(lambda x: rope(x, table), lambda x: rope_reference(x, table), [normal(2, 5, 3, 16)], dtype)


def test_rope_turns_neighbours_and_leaves_the_rest() -> None:
    x = normal(1, 5, 2, 16)
    positions = torch.tensor([[0, 1, 2, 0, 7]])
    out = rope(x, rope_table(positions, 8, 1e4))
    assert torch.equal(out[..., 8:], x[..., 8:])
    assert torch.equal(out[:, 0], x[:, 0])  # position 0 turns nothing
    for t, pair in itertools.product(range(5), range(4)):
        angle = positions[0, t].double() * 1e4 ** (-pair / 4)
        turn = torch.polar(torch.ones((), dtype=torch.float64), angle)
        expected = torch.complex(x[0, t, :, 2 * pair], x[0, t, :, 2 * pair + 1]) * turn
        assert torch.allclose(torch.view_as_real(expected), out[0, t, :, 2 * pair : 2 * pair + 2], atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiles", [(1, 30, 129, 5), (310, 4)])
def test_attention_in_both_dtypes(dtype: torch.dtype, tiles: tuple[int, ...]) -> None:
    """Documents on both sides of the length at which a CPU changes its numbers."""
    T = sum(tiles)
    inputs = [normal(1, T, 6, 16), normal(1, T, 2, 16, seed=1), normal(1, T, 2, 16, seed=2)]
    judge_all(
        lambda q, k, v: attention(q, k, v, tiles),
        lambda q, k, v: attention_reference(q, k, v, tiles),
        inputs,
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 37])
def test_lora_linear(dtype: torch.dtype, rows: int) -> None:
    weight, bias = normal(20, 60, seed=5), normal(20, seed=6)

    def with_frozen(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, A, B: function(x, weight.to(x.dtype), bias.to(x.dtype), A, B, scale=4.0)

    inputs = [normal(2, rows, 60), normal(8, 60, seed=1) * 0.1, normal(20, 8, seed=2) * 0.1]
    judge_all(with_frozen(lora_linear), with_frozen(lora_linear_reference), inputs, dtype)


def test_lora_dropout_is_of_the_adapter_alone_and_keeps_the_mean() -> None:
    """With B = identity and W = 0 what comes out is the dropped input itself."""
    x = torch.ones(400, 50, requires_grad=True)
    eye = torch.eye(50)
    torch.manual_seed(3)
    out = lora_linear(x, torch.zeros(50, 50), None, eye, eye.clone(), scale=1.0, dropout=0.3)
    values = torch.unique(out)
    assert values.tolist() == pytest.approx([0.0, 1 / 0.7])
    assert out.mean().item() == pytest.approx(1.0, abs=0.02)
    out.sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, out)  # the gradient takes the same mask
    torch.manual_seed(3)
    again = lora_linear(x, torch.zeros(50, 50), None, eye, eye.clone(), scale=1.0, dropout=0.3)
    other = lora_linear(x, torch.zeros(50, 50), None, eye, eye.clone(), scale=1.0, dropout=0.3)
    assert torch.equal(out, again)
    assert not torch.equal(out, other)


@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_keep_mask(share: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mask = keep_mask(torch.empty(999, 101, dtype=dtype), share)
    assert mask.dtype == dtype
    assert mask.shape == (999, 101)
    assert set(mask.unique().tolist()) == {0.0, 1.0}
    assert mask.double().mean().item() == pytest.approx(1 - share, abs=0.005)
    assert abs(torch.corrcoef(mask[:, :2].T.double())[0, 1].item()) < 0.1
