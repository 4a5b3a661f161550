"""The loss scale by its definition, gradients divided where they are clipped, and layers found too wide."""

import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from glm_accelerate.optim.mover import clipped, mover_of
from glm_accelerate.optim.precision import CEILING, FLOOR, Scale, rescale
from glm_accelerate.optim.widen import LARGEST, LEAST, ROOM, Extremes, Mixed, extremes

HALF, FULL = torch.float16, torch.float32


def test_the_scale_halves_at_an_overflow_and_doubles_after_patience() -> None:
    scale, course = Scale(16.0), [16.0]
    for finite in (True, True, True, False, True, True, False, False):
        scale = rescale(scale, finite, patience=3)
        course.append(scale.value)
    assert course == [16, 16, 16, 32, 16, 16, 16, 8, 4]
    assert rescale(Scale(16.0, 1), True, patience=3) == Scale(16.0, 2)
    assert rescale(Scale(16.0, 2), False, patience=3) == Scale(8.0, 0)


def test_the_scale_stays_between_floor_and_ceiling() -> None:
    low, high = Scale(FLOOR * 2), Scale(CEILING / 2)
    assert (low.lowest, high.lowest) == (False, False)
    for _ in range(3):
        low, high = rescale(low, False, patience=1), rescale(high, True, patience=1)
    assert (low.value, high.value, low.lowest) == (FLOOR, CEILING, True)


@pytest.mark.parametrize("limit", [0.0, 0.3, 1e6])
def test_clipping_divides_by_the_scale_to_the_last_bit(limit: float) -> None:
    """A power of two costs no digit: the same gradients as without a scale."""
    torch.manual_seed(0)
    plain = [nn.Parameter(torch.zeros(7, 5)), nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]
    scaled = [nn.Parameter(torch.zeros_like(weight)) for weight in plain]
    for one, other in zip(plain[:2], scaled[:2], strict=True):  # the third has none
        one.grad = torch.randn(one.shape)
        other.grad = one.grad * 1024
    one_step, other_step = SGD(plain), SGD(scaled)
    one_mover, other_mover = mover_of(one_step, clip=limit), mover_of(other_step, clip=limit)
    norm, other_norm = one_mover.norm(), other_mover.norm(1024.0)
    assert torch.equal(norm, other_norm)
    for mover in (one_mover, other_mover):
        mover.begin(0.0)
    one_mover.move(norm)
    other_mover.move(other_norm, 1024.0)
    for one, other in zip(plain[:2], scaled[:2], strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
    nothing = mover_of(SGD([nn.Parameter(torch.zeros(2))])).norm(1024.0)
    assert nothing.item() == 0.0
    assert clipped(nothing, limit).isfinite()


def test_an_own_loop_loses_no_small_gradient_and_outlives_an_overflow() -> None:
    """Any module: gradients of 1e-9 are zero in float16, and at 2^40 times the loss all are infinite."""

    def learn(scale: Scale) -> tuple[float, list[float]]:
        torch.manual_seed(1)
        layer, course = nn.Linear(4, 1), [scale.value]
        optimizer = SGD(layer.parameters())
        for _ in range(60):
            inputs = torch.randn(8, 4).half()
            out = nn.functional.linear(inputs, layer.weight.half(), layer.bias.half())
            loss = (out - 1).float().square().mean() * 1e-9
            (loss * scale.value).backward()
            norm = mover_of(optimizer).norm(scale.value)
            finite = math.isfinite(norm.item())
            if finite:
                mover_of(optimizer).begin(1e8)
                mover_of(optimizer).move(norm, scale.value)
            optimizer.zero_grad()
            scale = rescale(scale, finite, patience=1000)
            course.append(scale.value)
        return loss.item() * 1e9, course

    unscaled, _ = learn(Scale(1.0))
    scaled, course = learn(Scale(2.0**60))
    assert unscaled > 0.5
    assert scaled < 0.01
    assert all(later in (earlier, earlier / 2) for earlier, later in pairwise(course))
    assert 1 < course[-1] < 2.0**55


class Layer(nn.Module):
    """x + norm(x w) v, in x's dtype."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        inner = self.norm(nn.functional.linear(x, self.inner.weight.to(x.dtype)))
        return x + scale * nn.functional.linear(inner, self.outer.weight.to(x.dtype))


class Stack(nn.Module):
    """Three layers and a norm."""

    def __init__(self, outlier: float) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(Layer(16) for _ in range(3))
        self.layers[1].inner.weight.data.mul_(outlier)
        self.last = nn.LayerNorm(16, elementwise_affine=False)

    def mixed(self) -> Mixed:
        units = {str(number): layer for number, layer in enumerate(self.layers)}
        return Mixed(units, self.last, narrow=HALF, wide=FULL)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, 1.0)
        return self.last(x)


def measure(model: Stack, mixed: Mixed) -> dict[str, Extremes]:
    with mixed.measured(1.0) as gauges:
        model(torch.ones(5, 16, dtype=HALF)).float().square().sum().backward()
    return {name: extremes([gauge.numbers()]) for name, gauge in gauges.items()}


def test_an_outlier_is_found_and_moved_and_hooks_are_gone() -> None:
    model = Stack(1e6)
    mixed = model.mixed()
    x = torch.ones(5, 16, dtype=HALF)
    safe = model(x)  # before anything is known all is wide
    mixed.move(())
    assert not model(x).isfinite().all()
    found = measure(model, mixed)
    assert [name for name, each in found.items() if not each.fits] == ["1"]
    assert found["1"].value > LARGEST > found["0"].value > 0
    assert mixed.moved == frozenset()  # measuring alone changes nothing
    assert sum(len(part._forward_hooks) for part in model.layers.modules()) == 0
    mixed.move(["1"])
    out = model(x)
    assert out.dtype == HALF
    assert torch.allclose(out, safe, atol=5e-3)


def test_an_ordinary_model_stays_as_it_is() -> None:
    model = Stack(1.0)
    found = measure(model, model.mixed())
    assert all(each.fits for each in found.values())


def test_what_does_not_fit() -> None:
    edge = LARGEST / ROOM
    assert Extremes(edge, edge, 1.0).fits
    for odd in (edge * 1.01, math.inf, math.nan):
        assert not Extremes(odd, 0.0, 0.0).fits
        assert not Extremes(0.0, odd, 0.0).fits


def test_extremes_of_ranks_are_those_of_all() -> None:
    assert extremes([[1.0, 5.0, 10.0, 1.0], [3.0, 2.0, 30.0, 4.0]]) == Extremes(3.0, 5.0, 0.125)
    assert math.isnan(extremes([[math.nan, 0.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0]]).value)
    assert extremes([[0.0] * 4]) == Extremes(0.0, 0.0, 0.0)


def test_the_smallest_number_is_the_smallest() -> None:
    assert torch.tensor(LEAST, dtype=HALF).item() == LEAST
    assert torch.tensor(LEAST / 2.1, dtype=HALF).item() == 0.0


def test_the_loop_in_the_documentation_runs() -> None:
    page = (Path(__file__).parents[3] / "docs/howto/precision.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    told: dict[str, Any] = {"__name__": "page"}
    torch.manual_seed(0)
    exec(compile(code, "precision.md", "exec"), told)
    assert told["mixed"].moved == {"2", "3"}
    assert told["finite"]
    assert math.isfinite(told["loss"].item())
