"""The optimizer on the host: updates as on the device, gradients that leave at once, resume."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adafactor, AdamW, Optimizer

from glm_accelerate.kernels.native.build import load as library
from glm_accelerate.optim.host import HostOptimizer
from glm_accelerate.optim.mover import mover_of
from glm_accelerate.optim.one_pass import OnePassAdamW

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


def norm_of(optimizer: HostOptimizer) -> torch.Tensor:
    return torch.stack([gradient.float().norm() for gradient in optimizer.gradients()]).norm()


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clipping_is_that_of_the_device(limit: float) -> None:
    plain, moved = make(), make()
    there, here = adamw(groups_of(plain)), HostOptimizer(groups_of(moved), adamw, CPU)
    for step in range(3):
        passes(plain, step, 2)
        passes(moved, step, 2)
        device, host = mover_of(there, clip=limit), mover_of(here, clip=limit)
        norm = device.norm()
        assert host.norm().item() == pytest.approx(norm.item(), 1e-6)
        for mover in (device, host):
            mover.begin(1e-2)
            mover.move(norm)
            mover.end()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), moved.parameters(), strict=True))


def test_a_step_that_is_not_applied_leaves_nothing_behind() -> None:
    model, other = make(), make()
    optimizer, control = (HostOptimizer(groups_of(m), adamw, CPU) for m in (model, other))
    passes(model, 0, 2)
    assert torch.isfinite(norm_of(optimizer))
    model(torch.full((1, 5), float("nan"))).sum().backward()
    assert not torch.isfinite(norm_of(optimizer))
    optimizer.factor = 0.5
    optimizer.zero_grad()
    for m, o in ((model, optimizer), (other, control)):
        passes(m, 1, 1)
        o.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.skipif(library() is not None, reason="no C++ operators here")
def test_our_own_adamw_takes_gradients_as_they_come_and_writes_what_is_sent() -> None:
    """With bfloat16 weights: as AdamW on float32 masters with the same gradients."""

    def one_pass(groups: Any) -> Optimizer:
        return OnePassAdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-8)

    found: list[list[torch.Tensor]] = []
    for make_inner in (adamw, one_pass):
        model = nn.Linear(16, 64, dtype=torch.bfloat16)
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
        groups = [{"params": list(model.parameters()), "weight_decay": 0.1}]
        optimizer = HostOptimizer(groups, make_inner, CPU)
        for step in range(4):
            for number in range(1 + step % 2):
                linear_pass(model, number)
            optimizer.factor = 0.5
            optimizer.step()
        masters = [master for _, master, _ in optimizer.masters(model.named_parameters())]
        assert all(torch.equal(m.bfloat16(), p) for m, p in zip(masters, model.parameters(), strict=True))
        found.append([*masters, *(optimizer.state[master]["exp_avg_sq"] for master in masters)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def linear_pass(model: nn.Linear, seed: int) -> None:
    """Its gradients don't depend on the weights."""
    torch.manual_seed(seed)
    (model(torch.randn(4, 16).bfloat16()) * torch.randn(4, 64).bfloat16()).sum().backward()


def test_masters_keep_what_bfloat16_loses() -> None:
    """Updates that are less than half of a weight's last digit add up."""
    model = nn.Linear(16, 64, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    optimizer = HostOptimizer([{"params": [model.weight], "lr": 1e-3, "weight_decay": 0.0}], adamw, CPU)
    for step in range(8):
        linear_pass(model, 0)
        optimizer.step()
        assert (step < 1) <= bool((model.weight == 1).all())
    assert ((model.weight == 1).float().mean()) < 0.1


def test_matrices_on_the_device_may_be_narrower_than_what_they_were_read_as() -> None:
    """Masters begin as the weights were; layers that multiply in bfloat16 anyway compute the same."""
    model, whole = make(), make()
    optimizer = HostOptimizer(groups_of(model), adamw, CPU, dtype=torch.bfloat16)
    assert [p.dtype for p in model.parameters()] == [torch.bfloat16, torch.float32] * 2
    masters = {name: master for name, master, ahead in optimizer.masters(model.named_parameters()) if ahead}
    assert sorted(masters) == ["0.weight", "2.weight"]
    assert all(torch.equal(master, whole.get_parameter(name)) for name, master in masters.items())
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(4, 5)
        assert torch.equal(model(x), whole(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    def run(model: nn.Module, optimizer: HostOptimizer, first: int, last: int) -> None:
        for step in range(first, last):
            passes(model, step, 2)
            optimizer.factor = 0.5
            optimizer.step()

    whole = make(dtype)
    run(whole, HostOptimizer(groups_of(whole), adamw, CPU), 0, 9)
    half = make(dtype)
    optimizer = HostOptimizer(groups_of(half), adamw, CPU)
    run(half, optimizer, 0, 4)
    saved = {key: value.clone() for key, value in mover_of(optimizer).state(half.named_parameters()).items()}
    assert all(type(value) is torch.Tensor for value in saved.values())
    assert ("0.weight::master" in saved) == (dtype == torch.bfloat16)
    again = make(dtype)
    resumed = HostOptimizer(groups_of(again), adamw, CPU)
    again.load_state_dict(half.state_dict())
    mover_of(resumed).load(again.named_parameters(), saved)
    run(again, resumed, 4, 9)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))
