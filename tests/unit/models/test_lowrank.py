"""Two thin matrices in the place of a large one: the best of their rank, where they save something."""

import pytest
import torch
from torch import Tensor, nn

from glm_accelerate.models.adapt.lowrank import (
    LowRank,
    factor,
    factored,
    factors,
    holding,
    multiply_out,
    rank_for,
)
from glm_accelerate.models.float8 import Float8Linear, float8_products
from glm_accelerate.models.weights import load_model

TOKENS = torch.randint(0, 131, (2, 19), generator=torch.Generator().manual_seed(0))


def decaying(outputs: int, inputs: int, seed: int = 0) -> Tensor:
    """A matrix whose singular values fall slowly enough to need several tiles of 16."""
    generator = torch.Generator().manual_seed(seed)
    rank = min(outputs, inputs)
    left, _ = torch.linalg.qr(torch.randn(outputs, rank, generator=generator))
    right, _ = torch.linalg.qr(torch.randn(inputs, rank, generator=generator))
    return left * (1 / (1 + torch.arange(rank) / 5)) @ right.T


def kept(weight: Tensor, approximation: Tensor) -> float:
    return 1 - float((weight - approximation).square().sum() / weight.square().sum())


@pytest.mark.parametrize("shape", [(96, 60), (60, 96), (130, 131), (96, 96)])
@pytest.mark.parametrize("energy", [0.5, 0.8, 0.9])
def test_it_is_the_truncated_svd_at_the_least_tile_of_ranks_that_keeps_the_energy(shape, energy):
    weight = decaying(*shape)
    thin = factored(holding(weight, None), energy)
    assert isinstance(thin, LowRank)
    left, values, right = torch.linalg.svd(weight.double(), full_matrices=False)
    best = (left[:, : thin.rank] * values[: thin.rank]) @ right[: thin.rank]
    product = thin.multiplied().weight.double()
    assert float((product - best).norm() / best.norm()) < 1e-6
    assert thin.rank % 16 == 0
    assert kept(weight, product) >= energy - 1e-6
    fewer = thin.rank - 16
    assert float(values[:fewer].square().sum() / values.square().sum()) < energy  # none of them is idle
    assert sum(p.numel() for p in thin.parameters()) < weight.numel()


def test_both_matrices_are_of_one_size():
    thin = factored(holding(decaying(96, 60) * 50, None), 0.8)
    assert thin is not None
    columns, rows = thin.outer.weight.norm(dim=0), thin.inner.weight.norm(dim=1)
    assert torch.allclose(columns, rows, rtol=1e-4)


def test_a_matrix_that_would_grow_stays():
    flat = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(1)))[0]
    assert factored(holding(flat, None), 0.9) is None
    assert factored(holding(torch.randn(32, 16), None), 0.1) is None  # rank 16 of 16


def test_a_matrix_of_low_rank_or_of_zeros_gives_no_nan():
    narrow = torch.randn(80, 3) @ torch.randn(3, 70)
    thin = factored(holding(narrow, None), 1 - 1e-9)
    assert thin is not None
    assert thin.rank == 16
    assert torch.allclose(thin.multiplied().weight, narrow, atol=1e-4)
    nothing = factored(holding(torch.zeros(64, 64), None), 0.9)
    assert nothing is not None
    assert not nothing.multiplied().weight.any()


def test_ranks_are_rounded_up():
    squares = torch.ones(64, dtype=torch.float64)
    assert [rank_for(squares, share) for share in (0.01, 0.25, 0.26, 0.5, 1.0)] == [16, 16, 32, 32, 64]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_products_and_gradients_are_as_good_as_those_of_torch(dtype):
    """Against float64, beside nn.functional on the same factors."""
    thin = factored(holding(decaying(96, 61), torch.randn(96)), 0.8)
    assert thin is not None
    x = torch.randn(7, 61, dtype=torch.float64)
    outer, inner, bias = thin.outer.weight, thin.inner.weight, thin.outer.bias
    assert bias is not None

    def run(thin_: bool, kind: torch.dtype) -> list[Tensor]:
        leaves = [p.detach().to(kind).requires_grad_() for p in (x, inner, outer, bias)]
        if thin_:
            own = LowRank(holding(leaves[1], None), holding(leaves[2], leaves[3])).requires_grad_(True)
            out = own(leaves[0])
            out.square().sum().backward()
            grads = [leaves[0].grad, own.inner.weight.grad, own.outer.weight.grad]
        else:
            mid = nn.functional.linear(leaves[0], leaves[1])
            out = nn.functional.linear(mid, leaves[2], leaves[3])
            out.square().sum().backward()
            grads = [leaf.grad for leaf in leaves[:3]]  # in the order of `own`
        return [out.detach(), *(grad for grad in grads if grad is not None)]

    exact, ours, theirs = run(False, torch.float64), run(True, dtype), run(False, dtype)
    assert len(exact) == len(ours) == 4
    for right, mine, other in zip(exact, ours, theirs, strict=True):
        ulp = float(right.abs().max()) * torch.finfo(dtype).eps
        assert (
            float((mine.double() - right).abs().max())
            <= 2 * float((other.double() - right).abs().max()) + ulp
        )


@pytest.mark.parametrize("family", ["glm", "glm4", "chatglm"])
def test_a_factored_model_is_smaller_and_multiplies_out_to_a_plain_one(family, make_model):
    model, plain = (load_model(make_model(family, seed=seed)) for seed in (0, 1))
    before = sum(p.numel() for p in model.parameters())
    factor(model, 0.6)
    assert {name.rpartition(".")[2] for name in factors(model)} >= {"gate_up_proj", "down_proj", "o_proj"}
    assert sum(p.numel() for p in model.parameters()) < before
    logits = model(TOKENS).detach()
    multiply_out(model)
    assert not factors(model)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert float((model(TOKENS) - logits).abs().max() / logits.abs().max()) < 1e-5


def test_its_two_layers_take_8_bit_products_like_any_other(make_model):
    model = load_model(make_model("glm4", hidden_size=64, intermediate_size=96), dtype=torch.bfloat16)
    factor(model, 0.6)
    assert float8_products(model, simulated=True) == []
    assert all(isinstance(thin.inner, Float8Linear) for thin in factors(model).values())
    assert model(TOKENS).isfinite().all()
