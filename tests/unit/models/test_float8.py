"""A whole model with 8-bit products: the same tensors under the same names, close to what it was."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from glm_accelerate.config.schema import AdaptSection
from glm_accelerate.models.adapt import adapt
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.linear import float8_products, linear_layers
from glm_accelerate.models.weights import load_model
from glm_accelerate.prove.model import prove_isolation


def made(directory: Path, method: str, simulated: bool | None) -> Decoder:
    model = load_model(directory).train()
    adapt(model, AdaptSection.model_validate({"method": method, "dropout": 0.0}))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    if simulated is not None:
        assert float8_products(model, simulated=simulated) == []
    return model


@pytest.mark.parametrize("method", ["full", "lora"])
def test_close_to_float32_and_the_simulated_form_is_the_real_one(
    method: str, make_model: Callable[..., Path]
) -> None:
    directory = make_model("glm4", hidden_size=64, intermediate_size=96)
    tokens = torch.randint(0, 131, (2, 40), generator=torch.Generator().manual_seed(0))
    found: list[dict[str, torch.Tensor]] = []
    for simulated in (None, False, True):
        model = made(directory, method, simulated)
        out = model(tokens).float()
        out.square().mean().backward()
        grads = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
        found.append({"out": out.detach(), **grads})
    plain, real, simulated = found
    assert plain.keys() == real.keys() == simulated.keys()
    for name in plain:
        assert apart(real[name], simulated[name]) < 0.02, name  # a last bit may round to another number
        assert 0 < apart(real[name], plain[name]) < 0.6, name
    assert apart(real["out"], plain["out"]) < 0.2


def test_documents_in_one_pass_do_not_see_each_other(make_model: Callable[..., Path]) -> None:
    """As every start proves it."""
    model = made(make_model("glm4", hidden_size=64, intermediate_size=96), "lora", True)
    proof = prove_isolation(model)
    assert proof.ok, proof.said


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def test_layers_keep_their_tensors_and_names(make_model: Callable[..., Path]) -> None:
    directory = make_model("glm4", hidden_size=64, intermediate_size=96)
    model = made(directory, "lora", None)
    before = dict(model.named_parameters())
    float8_products(model, simulated=True)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert {layer.float8 for _, layer in linear_layers(model)} == {"simulated"}
    assert all(layer.adapter is not None for _, layer in linear_layers(model))


def test_sizes_that_the_hardware_cannot_take_are_named(make_model: Callable[..., Path]) -> None:
    model = made(make_model("glm4"), "full", None)  # 60 wide
    left = float8_products(model, simulated=True)
    assert len(left) == 3 * 6
    assert "layers.0.self_attn.q_proj" in left
