"""Neighbouring layers share projections and matrices become two thin ones: the best of their rank, where they
save something; what comes of it is a model like any other.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from glm_accelerate.config.schema import AdaptSection
from glm_accelerate.export.compress import compress, expand, factored, rank_for
from glm_accelerate.models.adapt import adapt, adapted_layers, count, merge
from glm_accelerate.models.adapter_files import load_adapter, save_adapter
from glm_accelerate.models.bind import bind_operators, bound
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.linear import LowRank, float8_products, linear_layers
from glm_accelerate.models.weights import load_model
from glm_accelerate.models.write import save_model
from glm_accelerate.prove.model import prove_coverage
from glm_accelerate.runtime.errors import UserError

Make = Callable[..., Path]
TOKENS = torch.randint(0, 131, (2, 19), generator=torch.Generator().manual_seed(0))
FAMILIES = ["glm", "glm4", "chatglm"]
WAYS = [(2, 1.0), (1, 0.6), (2, 0.6), (3, 0.5)]


def decaying(outputs: int, inputs: int, seed: int = 0) -> Tensor:
    """A matrix whose singular values fall slowly enough to need several tiles of 16."""
    generator = torch.Generator().manual_seed(seed)
    rank = min(outputs, inputs)
    left, _ = torch.linalg.qr(torch.randn(outputs, rank, generator=generator))
    right, _ = torch.linalg.qr(torch.randn(inputs, rank, generator=generator))
    return left * (1 / (1 + torch.arange(rank) / 5)) @ right.T


def kept(weight: Tensor, approximation: Tensor) -> float:
    return 1 - float((weight - approximation).square().sum() / weight.square().sum())


def size(model: Decoder) -> int:
    return sum(p.numel() for p in model.parameters())


def loss(model: Decoder) -> Tensor:
    return model(TOKENS).log_softmax(-1).square().mean()


def far(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.parametrize("shape", [(96, 60), (60, 96), (130, 131), (96, 96)])
@pytest.mark.parametrize("energy", [0.5, 0.8, 0.9])
def test_it_is_the_truncated_svd_at_the_least_tile_of_ranks_that_keeps_the_energy(
    shape: tuple[int, int], energy: float
) -> None:
    weight = decaying(*shape)
    pair = factored(weight, energy)
    assert pair is not None
    outer, inner = pair
    rank = len(inner)
    left, values, right = torch.linalg.svd(weight.double(), full_matrices=False)
    best = (left[:, :rank] * values[:rank]) @ right[:rank]
    product = (outer @ inner).double()
    assert float((product - best).norm() / best.norm()) < 1e-6
    assert rank % 16 == 0
    assert kept(weight, product) >= energy - 1e-6
    fewer = rank - 16
    assert float(values[:fewer].square().sum() / values.square().sum()) < energy  # none of them is idle
    assert outer.numel() + inner.numel() < weight.numel()


def test_both_matrices_are_of_one_size() -> None:
    pair = factored(decaying(96, 60) * 50, 0.8)
    assert pair is not None
    assert torch.allclose(pair[0].norm(dim=0), pair[1].norm(dim=1), rtol=1e-4)


def test_a_matrix_that_would_grow_stays() -> None:
    flat = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(1)))[0]
    assert factored(flat, 0.9) is None
    assert factored(torch.randn(32, 16), 0.1) is None  # rank 16 of 16


def test_a_matrix_of_low_rank_or_of_zeros_gives_no_nan() -> None:
    narrow = torch.randn(80, 3) @ torch.randn(3, 70)
    pair = factored(narrow, 1 - 1e-9)
    assert pair is not None
    assert len(pair[1]) == 16
    assert torch.allclose(pair[0] @ pair[1], narrow, atol=1e-4)
    nothing = factored(torch.zeros(64, 64), 0.9)
    assert nothing is not None
    assert not (nothing[0] @ nothing[1]).any()


def test_ranks_are_rounded_up() -> None:
    squares = torch.ones(64, dtype=torch.float64)
    assert [rank_for(squares, share) for share in (0.01, 0.25, 0.26, 0.5, 1.0)] == [16, 16, 32, 32, 64]


@pytest.mark.parametrize("family", FAMILIES)
def test_groups_share_and_the_rest_of_a_model_stays(family: str, make_model: Make) -> None:
    plain = load_model(make_model(family))
    model = compress(plain, share_qk=2)
    first, second, third = (block.self_attn for block in model.layers)
    assert second.q_proj is first.q_proj
    assert second.k_proj is first.k_proj
    assert second.v_proj is not first.v_proj
    assert third.q_proj is not first.q_proj  # the last group is what is left
    query_and_key = (60 + 1) * (96 + 32)  # weights and biases of one layer
    assert size(plain) - size(model) == query_and_key
    names = [name for name, _ in model.named_parameters()]
    assert "layers.0.self_attn.q_proj.weight" in names
    assert not any(
        name.startswith(("layers.1.self_attn.q_proj", "layers.1.self_attn.k_proj")) for name in names
    )
    bind_operators(model)
    assert bound(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_of_what_is_shared_is_the_sum_over_its_layers(family: str, make_model: Make) -> None:
    model = compress(load_model(make_model(family)), share_qk=2)
    own = expand(model)  # equal weights in layers of their own
    for each in (model, own):
        each.requires_grad_(True)
        loss(each).backward()
    assert torch.allclose(loss(model), loss(own), rtol=1e-6)
    shared = model.get_parameter("layers.0.self_attn.q_proj.weight").grad
    leaf = "query_key_value" if family == "chatglm" else "q_proj"
    parts = [own.get_parameter(f"layers.{layer}.self_attn.{leaf}.weight").grad for layer in (0, 1)]
    assert shared is not None
    summed = sum(part[:96] for part in parts if part is not None)
    assert torch.allclose(shared, summed, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("share", "energy"), WAYS)
def test_expanded_it_is_a_plain_model_with_the_same_logits(
    family: str, share: int, energy: float, make_model: Make
) -> None:
    plain = load_model(make_model(family))
    model = compress(plain, share_qk=share, keep_energy=energy)
    assert model.sizes.shared_qk == share
    assert bool(model.sizes.ranks) == (energy < 1)
    assert size(model) < size(plain)
    whole = expand(model)
    assert whole.sizes == plain.sizes
    assert {name: p.shape for name, p in whole.named_parameters()} == {
        name: p.shape for name, p in plain.named_parameters()
    }
    assert far(whole(TOKENS), model(TOKENS)) < 1e-5
    parameters = list(whole.parameters())
    assert len({p.data_ptr() for p in parameters}) == len(parameters)  # nothing lies on anything else
    assert expand(whole) is whole


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("share", "energy"), WAYS)
def test_written_and_read_it_is_the_same(family: str, share: int, energy: float, make_model: Make) -> None:
    path = make_model(family)
    model = compress(load_model(path), share_qk=share, keep_energy=energy)
    out = path.with_name("smaller")
    save_model(model, out, layout="structured")
    again = load_model(out)
    assert again.sizes == model.sizes
    assert torch.equal(again(TOKENS), model(TOKENS))


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_it_are_saved_loaded_and_merged(family: str, make_model: Make, tmp_path: Path) -> None:
    path = make_model(family)
    save_model(
        compress(load_model(path), share_qk=2, keep_energy=0.6), tmp_path / "base", layout="structured"
    )
    model, section = load_model(tmp_path / "base"), AdaptSection(method="lora", rank=4, dropout=0.0)
    adapt(model, section)
    assert prove_coverage(model, section).ok
    names = [name for name, _ in adapted_layers(model)]
    assert names == [name for name, _ in linear_layers(model)]
    assert not any(name.startswith("layers.1.self_attn.q_proj") for name in names)  # one for both
    for number, (_, layer) in enumerate(adapted_layers(model)):
        layer.lora_B.data.normal_(std=0.1, generator=torch.Generator().manual_seed(number))
    logits = model(TOKENS).detach()
    save_adapter(model, tmp_path / "adapter")
    other = load_model(tmp_path / "base")
    load_adapter(other, tmp_path / "adapter")
    assert torch.equal(other(TOKENS), logits)
    merge(other)
    assert other.layers[1].self_attn.q_proj is other.layers[0].self_attn.q_proj
    assert far(expand(other)(TOKENS), logits) < 1e-5


def test_a_projection_is_named_whole_where_it_is_factored(make_model: Make) -> None:
    model = compress(load_model(make_model("glm4")), keep_energy=0.6)
    adapt(model, AdaptSection(method="lora", targets=["down_proj"]))
    halves = {name.rpartition(".")[2] for name, _ in adapted_layers(model)}
    assert halves == {"inner", "outer"}
    assert all(".down_proj." in name for name, _ in adapted_layers(model))


def test_it_is_quantised_with_each_weight_packed_once(make_model: Make) -> None:
    plain = load_model(make_model("glm4"))
    model = compress(plain, share_qk=2, keep_energy=0.6)
    weights = size(model)
    adapt(model, AdaptSection(method="lora", base="int8", rank=4))
    assert model.layers[1].self_attn.q_proj is model.layers[0].self_attn.q_proj
    assert count(model) == weights + sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert model(TOKENS).isfinite().all()


def test_the_last_layers_train_what_no_frozen_layer_has(make_model: Make) -> None:
    model, section = (
        compress(load_model(make_model("glm4")), share_qk=3),
        AdaptSection(method="freeze", layers=1),
    )
    adapt(model, section)
    assert prove_coverage(model, section).ok
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all(name.startswith("layers.2.") for name in trained)


def test_its_two_layers_take_8_bit_products_like_any_other(make_model: Make) -> None:
    model = load_model(make_model("glm4", hidden_size=64, intermediate_size=96), dtype=torch.bfloat16)
    smaller = compress(model, share_qk=2, keep_energy=0.6)
    assert float8_products(smaller, simulated=True) == []
    halves = [part.inner for part in smaller.modules() if isinstance(part, LowRank)]
    assert halves
    assert smaller(TOKENS).isfinite().all()


def test_what_cannot_be_compressed_is_refused(make_model: Make) -> None:
    model = load_model(make_model("glm4"))
    with pytest.raises(UserError, match="1 to 3 layers can share"):
        compress(model, share_qk=4)
    with pytest.raises(UserError, match="nothing is to be compressed"):
        compress(model)
    with pytest.raises(UserError, match="already"):
        compress(compress(model, keep_energy=0.6), share_qk=2)
    adapt(model, AdaptSection(method="lora"))
    with pytest.raises(UserError, match="lora_A"):
        compress(model, share_qk=2)
