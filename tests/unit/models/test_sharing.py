"""Neighbouring layers with one query and one key projection between them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from glm_accelerate.config.schema import AdaptSection
from glm_accelerate.models.adapt import adapt
from glm_accelerate.models.adapt.lowrank import factors
from glm_accelerate.models.adapt.sharing import share_qk, sharing
from glm_accelerate.models.adapt.structure import Structure, carve, describe, described, expand, structure_of
from glm_accelerate.models.bind import bind_operators, bound
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.weights import load_model
from glm_accelerate.runtime.errors import UserError

Make = Callable[..., Path]
TOKENS = torch.randint(0, 131, (2, 19), generator=torch.Generator().manual_seed(0))
FAMILIES = ["glm", "glm4", "chatglm"]


def weights(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def size(model: Decoder) -> int:
    return sum(p.numel() for p in model.parameters())


def loss(model: Decoder) -> torch.Tensor:
    return model(TOKENS).log_softmax(-1).square().mean()


@pytest.mark.parametrize("family", FAMILIES)
def test_groups_share_and_the_rest_of_a_model_stays(family: str, make_model: Make) -> None:
    path = make_model(family)
    model, plain = load_model(path), load_model(path)
    share_qk(model, 2)
    assert sharing(model) == 2
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
    model = load_model(make_model(family))
    share_qk(model, 2)
    own = load_model(model.origin.path)
    share_qk(own, 2)
    expand(own)  # equal weights in layers of their own
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
@pytest.mark.parametrize(("share", "energy"), [(2, 1.0), (1, 0.6), (2, 0.6), (3, 0.5)])
def test_expanded_it_is_a_plain_model_with_the_same_logits(
    family: str, share: int, energy: float, make_model: Make
) -> None:
    path = make_model(family)
    model, plain = load_model(path), load_model(path)
    adapt(model, AdaptSection(method="full", share_qk=share, keep_energy=energy))
    structure = structure_of(model)
    assert structure.share_qk == share
    assert bool(structure.ranks) == (energy < 1)
    assert size(model) < size(plain)
    assert all(p.requires_grad for p in model.parameters())
    logits = model(TOKENS).detach()
    expand(model)
    assert structure_of(model).plain
    assert {name: p.shape for name, p in model.named_parameters()} == {
        name: p.shape for name, p in plain.named_parameters()
    }
    assert float((model(TOKENS) - logits).abs().max() / logits.abs().max()) < 1e-5
    parameters = list(model.parameters())
    assert len({p.data_ptr() for p in parameters}) == len(parameters)  # nothing lies on anything else


@pytest.mark.parametrize("share", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_places_are_made_from_shapes_alone_and_filled(family: str, share: int, make_model: Make) -> None:
    path = make_model(family)
    section = AdaptSection(method="full", share_qk=share, keep_energy=0.6)
    model, again = load_model(path), load_model(path)
    adapt(model, section)
    held = weights(model)
    adapt(again, section, shapes={name: tensor.shape for name, tensor in held.items()})
    assert structure_of(again) == structure_of(model)
    assert not again(TOKENS).isfinite().any()  # what is not filled is seen
    places = dict(again.named_parameters())
    assert places.keys() == held.keys()
    for name, place in places.items():
        place.data.copy_(held[name])
    assert torch.equal(again(TOKENS), model(TOKENS))


def test_a_structure_is_written_and_read(make_model: Make) -> None:
    model = load_model(make_model("glm4"))
    adapt(model, AdaptSection(method="full", share_qk=2, keep_energy=0.6))
    said = describe(structure_of(model), model.origin.config)
    assert said["model_type"] not in ("glm", "glm4", "chatglm")  # nobody opens it by mistake
    assert str(structure_of(model)).startswith("each 2 layers share queries and keys, ")
    assert described(said, "here") == (model.origin.config, structure_of(model))
    assert described(model.origin.config, "here") == (model.origin.config, Structure(1, {}))
    for damage in ({"structure": None}, {"structure": {"share_qk": 0, "ranks": {}}}, {"model": 3}):
        with pytest.raises(UserError, match="does not say how"):
            described({**said, **damage}, "here")
    with pytest.raises(UserError, match="no layer is called"):
        carve(load_model(model.origin.path), Structure(1, {"layers.7.mlp.down_proj": 16}))


def test_what_does_not_go_together_is_refused_by_name(make_model: Make) -> None:
    for method in ("lora", "freeze", "prefix"):
        with pytest.raises(ValidationError, match="say method full"):
            AdaptSection(method=method, share_qk=2)
    model = load_model(make_model("glm4"))
    with pytest.raises(UserError, match="the model has 3 layers"):
        adapt(model, AdaptSection(method="full", share_qk=4))
    adapt(model, AdaptSection(method="full", keep_energy=0.6))
    with pytest.raises(UserError, match="already"):
        adapt(model, AdaptSection(method="full", share_qk=2))
    with pytest.raises(UserError, match="only trains whole"):
        adapt(model, AdaptSection(method="lora"))
    assert factors(model)
    with torch.device("meta"):
        bare = Decoder(model.sizes, model.origin)
    with pytest.raises(UserError, match="begin on a model's weights"):
        adapt(bare, AdaptSection(method="full", share_qk=2))
