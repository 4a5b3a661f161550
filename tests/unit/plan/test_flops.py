"""Counted operations against torch's own counter, which sees every product that a real pass makes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from glm_accelerate.bench.peak import data_sheet, peak
from glm_accelerate.config.schema import AdaptSection
from glm_accelerate.kernels.attention import attention_reference
from glm_accelerate.models.adapt import adapt
from glm_accelerate.models.layout import Layout
from glm_accelerate.models.weights import load_model
from glm_accelerate.plan.cost import Trained, attended_flops, pairs, product_flops, step_flops

LENGTHS = (13, 24, 1, 40)
TOKENS, TARGETS = sum(LENGTHS), 7


@pytest.mark.parametrize("family", ["glm4", "chatglm"])
@pytest.mark.parametrize("method", ["full", "freeze", "lora"])
def test_the_products_are_those_that_torch_counts(
    family: str, method: str, make_model: Callable[..., Path]
) -> None:
    model = load_model(make_model(family))
    said = {"method": method, "layers": 2, "rank": 1, "dropout": 0.0}
    adapt(model, AdaptSection.model_validate(said))
    if method == "lora":
        model.embed.requires_grad_(True)  # else the first layer's input needs no gradient
    with FlopCounterMode(display=False) as counted:
        hidden = model.hidden(torch.randint(131, (1, TOKENS)), Layout.of_documents([LENGTHS]))
        model.head(hidden[0, :TARGETS]).sum().backward()
    seen = counted.get_flop_counts()["Global"]
    products = sum(taken for op, taken in seen.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    mine = product_flops(model.sizes, Trained(method, layers=2), TOKENS, TARGETS)
    if method == "lora":  # the adapter's own are left out by ours, and torch knows no product in place (B's)
        adapter = {name: p.numel() for name, p in model.named_parameters() if ".lora_" in name}
        mine += sum(2 * TOKENS * (3 if "lora_A" in name else 2) * size for name, size in adapter.items())
    assert products == mine


def test_attention_is_the_causal_half_of_what_a_dense_one_multiplies(make_model: Callable[..., Path]) -> None:
    sizes = load_model(make_model("glm4")).sizes
    length = 33
    q, k, v = (torch.randn(1, length, sizes.heads, sizes.head_width, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as counted:
        attention_reference(q, k, v, [length]).sum().backward()
    half = (length + 1) / (2 * length)
    alone, prefixed = (attended_flops(sizes, Trained(), pairs([length], tokens)) for tokens in (0, 5))
    assert alone == sizes.layers * half * counted.get_total_flops()
    assert prefixed / alone == pytest.approx(1 + 5 / ((length + 1) / 2))


def test_a_step_is_four_or_six_operations_a_weight_and_token(make_model: Callable[..., Path]) -> None:
    """The rule that published figures go by, where every token is a target and documents are short."""
    sizes = load_model(make_model("glm4")).sizes
    linear = sizes.layers * (
        sizes.width * 2 * (sizes.heads + sizes.kv_heads) * sizes.head_width
        + 3 * sizes.width * sizes.mlp_width
    )
    n = linear + sizes.vocabulary * sizes.width
    for method, times in (("lora", 4), ("full", 6), ("prefix", 4)):
        assert product_flops(sizes, Trained(method), 10, 10) == times * n * 10
        assert step_flops(sizes, Trained(method), [1] * 10, 10) > times * n * 10


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", None),
        ("", None),
    ],
)
def test_a_name_finds_its_data_sheet(name: str, value: float | None) -> None:
    assert data_sheet(name) == value


def test_the_measured_peak_is_one_of_this_machine() -> None:
    found = peak(torch.device("cpu"), "float32")
    assert found.measured > 1e8
    assert (found.dtype, found.data_sheet) == ("float32", None)
