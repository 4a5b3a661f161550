"""A rehearsal leaves nothing behind, and what would not fit is named before the first step."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adafactor, AdamW, Optimizer

from glm_accelerate.config.schema import AdaptSection, OptimSection
from glm_accelerate.data.largest import find_largest, largest_steps
from glm_accelerate.data.order import Order
from glm_accelerate.data.types import Batch, FilePlace, Sample, Step
from glm_accelerate.memory.static import make_moments, rehearse
from glm_accelerate.models.adapt import adapt
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.weights import load_model
from glm_accelerate.optim.build import build_optimizer
from glm_accelerate.optim.mover import mover_of
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.training.step import WholeModel, train_step

CPU = torch.device("cpu")


def samples(count: int = 12) -> list[Sample]:
    draw = np.random.default_rng(0)
    made: list[Sample] = []
    for number in range(count):
        length = int(draw.integers(3, 90))
        tokens = draw.integers(0, 131, length).astype(np.int32)
        made.append(Sample(tokens, draw.random(length) < 0.5, FilePlace("made", number + 1)))
    return made


def largest(taken: list[Sample], micro_tokens: int) -> tuple[Step, ...]:
    lengths = np.array([len(sample) for sample in taken], np.int32)
    targets = np.array([sample.targets.sum() for sample in taken], np.int32)
    order = Order(lengths, ((0, len(taken), 1.0),), 0, step_samples=4)
    told = {"batching": "pack", "micro_tokens": micro_tokens, "position": 0, "total": 3}
    found = find_largest(order, targets, **told)
    return largest_steps(taken, found)


def trained(directory: Path, method: str, name: str, *, rehearsed: bool) -> dict[str, Tensor]:
    """Weights and moments after two steps, and the generator's state."""
    model = load_model(directory)
    adapt(model, AdaptSection.model_validate({"method": method}), seed=1)
    model.train()
    optimizer = build_optimizer(model.named_parameters(), OptimSection.model_validate({"name": name}))
    torch.manual_seed(5)
    taken = samples()
    steps = largest(taken, micro_tokens=64)
    if rehearsed:
        make_moments(optimizer)
        each = largest(taken, micro_tokens=64)
        rehearse(each, optimizer, WholeModel(model, CPU), CPU)
        assert all(weight.grad is None for weight in model.parameters())
    for step in (steps[0], steps[-1]):
        train_step(WholeModel(model, CPU), mover_of(optimizer, clip=1.0), step, 1e-2)
    state = {f"weight {name}": weight.detach() for name, weight in model.named_parameters()}
    for number, moments in enumerate(optimizer.state.values()):
        state |= {f"moment {number} {key}": value for key, value in moments.items()}
    return state | {"generator": torch.get_rng_state()}


@pytest.mark.parametrize("method", ["lora", "full", "freeze", "prefix"])
@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_nothing_of_it_stays(method: str, name: str, make_model: Callable[..., Path]) -> None:
    directory = make_model("glm4")
    plain, after = (trained(directory, method, name, rehearsed=asked) for asked in (False, True))
    assert plain.keys() == after.keys()
    assert any(key.startswith("moment") for key in plain)
    for key, value in plain.items():
        assert torch.equal(value, after[key]), key


def weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(7, 5)), nn.Parameter(torch.randn(3)), nn.Parameter(torch.zeros(2, 2))]


@pytest.mark.parametrize("make", [AdamW, Adafactor])
def test_moments_are_those_of_a_beginning(make: Callable[..., Optimizer]) -> None:
    parameters = weights()
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = make([{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.0}], lr=0.3)
    make_moments(optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.3, 0.3]
    for parameter, kept in zip(parameters, before, strict=True):
        assert torch.equal(parameter, kept)
        assert parameter.grad is None
        assert optimizer.state[parameter]
        assert all(not value.any() for value in optimizer.state[parameter].values())


def test_moments_that_are_there_stay() -> None:
    parameters = weights()
    optimizer = AdamW(parameters, fused=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = [parameter.detach().clone() for parameter in parameters]
    make_moments(optimizer)
    for parameter, kept in zip(parameters, before, strict=True):
        assert torch.equal(parameter, kept)
        assert optimizer.state[parameter]["step"] == 1
        assert optimizer.state[parameter]["exp_avg"].any()


def step_of(width: int) -> Step:
    tokens_RT = np.zeros((1, width), np.int64)
    batch = Batch(tokens_RT, tokens_RT, ((width - 64, 64),), samples=2, tokens=width, targets=width)
    return Step(1234, 0, (batch,), (5, 6), tokens=width, targets=width)


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_what_does_not_fit_is_named(error: Exception) -> None:
    def forward_backward(step: Step) -> None:
        raise error

    with pytest.raises(UserError) as caught:
        rehearse([step_of(4096)], AdamW(weights()), forward_backward, CPU)
    assert "step 1,234 would run out of memory" in caught.value.what
    assert "4,096 positions, documents of up to 4,032 tokens" in caught.value.what
    assert caught.value.cure is not None


def test_an_allocation_that_cannot_be_is_named() -> None:
    """torch's own error on a CPU, not one that we made up."""
    with pytest.raises(UserError, match="would run out of memory"):
        rehearse([step_of(128)], AdamW(weights()), lambda step: torch.empty(1 << 60, dtype=torch.int8), CPU)


def test_other_errors_are_what_they_are() -> None:
    def forward_backward(step: Step) -> None:
        raise RuntimeError("another mistake")

    with pytest.raises(RuntimeError, match="another mistake"):
        rehearse([step_of(128)], AdamW(weights()), forward_backward, CPU)


def test_people_are_told_of_the_largest_pass(make_model: Callable[..., Path]) -> None:
    model: Decoder = load_model(make_model("glm4")).requires_grad_(True)
    steps = largest(samples(), micro_tokens=4096)
    told = rehearse(steps, AdamW(model.parameters()), WholeModel(model, CPU), CPU)
    count, widest = sum(len(step.batches) for step in steps), steps[0]
    positions = max(step.batches[0].tokens_RT.size for step in steps)
    assert re.fullmatch(
        rf"the largest pass fits: {positions:,} positions, of step {widest.number:,}; "
        rf"{'1 pass' if count == 1 else f'{count} passes'} rehearsed in \d+\.\d s",
        told,
    )
