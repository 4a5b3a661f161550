"""Schedules by their definition, clipping, and optimizer state that survives a round trip."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from glm_accelerate.config.schema import OptimSection
from glm_accelerate.optim.build import build_optimizer
from glm_accelerate.optim.mover import mover_of
from glm_accelerate.optim.schedule import rate


def rates(
    schedule: str, total: int = 100, warmup: int = 10, decay: float = 0.2, floor: float = 0.1
) -> list[float]:
    return [
        rate(applied, total, schedule=schedule, warmup=warmup, decay=decay, floor=floor)
        for applied in range(total)
    ]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd", "constant"])
def test_warmup_rises_to_the_highest_rate_and_never_beyond(schedule: str) -> None:
    found = rates(schedule)
    assert found[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert max(found) == pytest.approx(1.0)
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(found[10:]))


def test_shapes() -> None:
    assert rates("linear")[55] == pytest.approx(1 - 0.9 * 0.5)
    assert rates("cosine")[55] == pytest.approx(0.55)
    assert rates("cosine")[10 + 30] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 3)) / 2)
    assert rates("wsd")[:82] == pytest.approx([*rates("constant")[:82]])
    assert rates("wsd")[91] == pytest.approx(0.55)
    assert rate(100, 100, schedule="linear", warmup=0, decay=0.2, floor=0.1) == pytest.approx(0.1)
    assert rate(0, 1, schedule="cosine", warmup=0, decay=0.2, floor=0.0) == 1.0


def test_clip_scales_to_the_limit_and_reports_the_norm_before() -> None:
    weights = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(1))]
    weights[0].grad, weights[1].grad = torch.tensor([3.0, 0.0, 0.0]), torch.full((2, 2), 2.0)
    optimizer = torch.optim.SGD(weights)
    norms: list[float] = []
    for limit in (0.5, 0.0, 10.0):
        mover = mover_of(optimizer, clip=limit)
        mover.begin(0.0)
        norms.append(mover.norm().item())
        mover.move(mover.norm())
    assert norms == pytest.approx([5.0, 0.5, 0.5], rel=1e-5)
    assert mover_of(optimizer).norm().item() == pytest.approx(0.5, rel=1e-5)
    weights[0].grad[0] = float("inf")
    assert not mover_of(optimizer).norm().isfinite()


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_state_round_trip_goes_on_bit_for_bit(name: str) -> None:
    section = OptimSection.model_validate({"name": name, "weight_decay": 0.1})

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))

    def run(model: nn.Sequential, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            torch.manual_seed(step)
            model(torch.randn(4, 5)).pow(2).sum().backward()
            mover_of(optimizer).begin(1e-2 / (step + 1))
            optimizer.step()
            optimizer.zero_grad()

    whole = make()
    run(whole, build_optimizer(whole.named_parameters(), section), 0, 9)
    half = make()
    optimizer = build_optimizer(half.named_parameters(), section)
    run(half, optimizer, 0, 4)
    saved = {key: value.clone() for key, value in mover_of(optimizer).state(half.named_parameters()).items()}
    again = make()
    again.load_state_dict(half.state_dict())
    resumed = build_optimizer(again.named_parameters(), section)
    mover_of(resumed).load(again.named_parameters(), saved)
    run(again, resumed, 4, 9)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


def test_only_matrices_decay() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7))
    optimizer = build_optimizer(model.named_parameters(), OptimSection(weight_decay=0.5))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decay[id(p)] for name, p in model.named_parameters()} == {
        "0.weight": 0.5,
        "0.bias": 0.0,
        "1.weight": 0.0,
        "1.bias": 0.0,
    }
