"""The optimizer on the host: updates as on the device, gradients that leave at once, resume."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adafactor, AdamW, Optimizer

from glm_accelerate.optim.clip import clip
from glm_accelerate.optim.host import HostOptimizer
from glm_accelerate.optim.state import load_optimizer_state, optimizer_state

CPU = torch.device("cpu")


def adamw(groups: Iterable[dict[str, Any]]) -> Optimizer:
    return AdamW(groups, lr=1e-2, fused=True)


def adafactor(groups: Iterable[dict[str, Any]]) -> Optimizer:
    return Adafactor(groups, lr=1e-2)


def make(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.ndim > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]


def passes(model: nn.Module, step: int, count: int) -> None:
    dtype = next(model.parameters()).dtype
    for number in range(count):
        torch.manual_seed(1000 * step + number)
        model(torch.randn(4, 5, dtype=dtype)).float().square().sum().backward()


@pytest.mark.parametrize("make_inner", [adamw, adafactor])
@pytest.mark.parametrize("count", [1, 3])
def test_updates_are_those_of_the_device(make_inner: Any, count: int) -> None:
    plain, moved = make(), make()
    there, here = make_inner(groups_of(plain)), HostOptimizer(groups_of(moved), make_inner, CPU, room=1)
    for step in range(5):
        for model, optimizer in ((plain, there), (moved, here)):
            passes(model, step, count)
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (step + 1)
            if model is moved:
                assert all(parameter.grad is None for parameter in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), moved.parameters(), strict=True))


@pytest.mark.parametrize(("limit", "scale"), [(0.5, 1.0), (0.0, 8.0), (0.5, 8.0), (1e6, 1.0)])
def test_clipping_is_that_of_the_device(limit: float, scale: float) -> None:
    plain, moved = make(), make()
    there, here = adamw(groups_of(plain)), HostOptimizer(groups_of(moved), adamw, CPU)
    for step in range(3):
        passes(plain, step, 2)
        passes(moved, step, 2)
        assert here.clip(limit, scale).item() == pytest.approx(
            clip(plain.parameters(), limit, scale).item(), 1e-6
        )
        there.step()
        here.step()
        there.zero_grad()
    for a, b in zip(plain.parameters(), moved.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_step_that_is_not_applied_leaves_nothing_behind() -> None:
    model, other = make(), make()
    optimizer, control = (HostOptimizer(groups_of(m), adamw, CPU) for m in (model, other))
    passes(model, 0, 2)
    model[0].weight.data.mul_(1)
    assert torch.isfinite(optimizer.clip(1.0))
    model(torch.full((1, 5), float("nan"))).sum().backward()
    assert not torch.isfinite(optimizer.clip(1.0))
    optimizer.zero_grad()
    for m, o in ((model, optimizer), (other, control)):
        passes(m, 1, 1)
        o.clip(1.0)
        o.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_masters_keep_what_bfloat16_loses() -> None:
    """Updates far smaller than a weight's last digit add up."""
    model = make(torch.bfloat16)
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer = HostOptimizer(groups_of(model), adamw, CPU)
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 1e-5, 0.0
    for step in range(400):
        passes(model, 0, 1)
        optimizer.step()
        if step == 0:
            now = list(model.parameters())
            assert torch.equal(now[0], before[0])
    weights = dict(model.named_parameters())
    masters = {name: master for name, master, _ in optimizer.masters(weights.items())}
    assert all(torch.equal(masters[name].bfloat16(), weight) for name, weight in weights.items())
    assert not torch.equal(next(model.parameters()), before[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    def run(model: nn.Module, optimizer: HostOptimizer, first: int, last: int) -> None:
        for step in range(first, last):
            passes(model, step, 2)
            optimizer.clip(1.0)
            optimizer.step()

    whole = make(dtype)
    run(whole, HostOptimizer(groups_of(whole), adamw, CPU), 0, 9)
    half = make(dtype)
    optimizer = HostOptimizer(groups_of(half), adamw, CPU)
    run(half, optimizer, 0, 4)
    saved = {key: value.clone() for key, value in optimizer_state(optimizer, half.named_parameters()).items()}
    assert all(type(value) is torch.Tensor for value in saved.values())
    assert ("0.weight::master" in saved) == (dtype == torch.bfloat16)
    again = make(dtype)
    resumed = HostOptimizer(groups_of(again), adamw, CPU)
    again.load_state_dict(half.state_dict())
    load_optimizer_state(resumed, again.named_parameters(), saved)
    run(again, resumed, 4, 9)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))
