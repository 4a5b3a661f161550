"""A step is exact: however its samples are laid into batches, the gradients are those of the mean."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from glm_accelerate.config.schema import AdaptSection, OptimSection
from glm_accelerate.data.pack import ARRANGE
from glm_accelerate.data.pipeline import collate
from glm_accelerate.data.types import FilePlace, Sample, Step
from glm_accelerate.models.adapt import adapt
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.weights import load_model
from glm_accelerate.optim.build import build_optimizer
from glm_accelerate.optim.mover import mover_of
from glm_accelerate.training.step import WholeModel, train_step

CPU = torch.device("cpu")


def samples(count: int = 9, seed: int = 0) -> list[Sample]:
    generator = np.random.default_rng(seed)
    made: list[Sample] = []
    for _ in range(count):
        length = int(generator.integers(3, 50))
        targets = generator.random(length) < 0.4
        targets[-1] = True
        tokens = generator.integers(0, 131, length).astype(np.int32)
        made.append(Sample(tokens, targets, FilePlace("made", 1)))
    return made


def step_of(taken: list[Sample], batching: str, micro_tokens: int) -> Step:
    made = ARRANGE[batching]([len(sample) for sample in taken], micro_tokens)
    batches = tuple(collate(arrangement, taken) for arrangement in made)
    tokens, targets = sum(batch.tokens for batch in batches), sum(batch.targets for batch in batches)
    return Step(1, 0, batches, tuple(range(len(taken))), tokens, targets)


def gradients(model: Decoder) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("family", ["chatglm", "glm", "glm4"])
def test_gradients_are_those_of_the_samples_one_by_one(family: str, make_model: Callable[..., Path]) -> None:
    model = load_model(make_model(family), dtype=torch.float64).requires_grad_(True)
    taken = samples()
    count = sum(int(sample.targets[1:].sum()) for sample in taken)
    expected_loss = 0.0
    for sample in taken:  # plainly: all logits of one document, shifted by one
        tokens = torch.from_numpy(sample.tokens.astype(np.int64))[None]
        learnt = torch.from_numpy(sample.targets[1:])
        loss = cross_entropy(model(tokens)[0, :-1][learnt], tokens[0, 1:][learnt], reduction="sum") / count
        loss.backward()
        expected_loss += loss.item()
    expected = gradients(model)
    for batching in ("pack", "bucket", "pad"):
        for micro_tokens in (64, 128, 4096):
            total = WholeModel(model, CPU)(step_of(taken, batching, micro_tokens))
            assert abs(total.item() - expected_loss) < 1e-6  # the step's sum is float32
            found = gradients(model)
            assert found.keys() == expected.keys()
            for name, gradient in found.items():
                scale = expected[name].abs().max()
                assert (gradient - expected[name]).abs().max() <= 1e-10 * scale, (
                    name,
                    batching,
                    micro_tokens,
                )


def test_recomputed_blocks_give_the_same_gradients(make_model: Callable[..., Path]) -> None:
    model = load_model(make_model("glm4")).train()
    adapt(model, AdaptSection(dropout=0.3), seed=1)
    for _, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    step = step_of(samples(), "pack", 4096)
    found: list[dict[str, Tensor]] = []
    for model.recompute in (False, True):
        torch.manual_seed(7)
        WholeModel(model, CPU)(step)
        found.append(gradients(model))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_nothing_flows_below_the_lowest_trainable_layer(make_model: Callable[..., Path]) -> None:
    """The activations that enter the first trainable block carry no graph."""
    model = load_model(make_model("glm4")).train()
    adapt(model, AdaptSection(method="freeze", layers=1))
    seen: list[bool] = []
    for block in model.layers:
        block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].requires_grad))
    WholeModel(model, CPU)(step_of(samples(), "pack", 4096))
    assert seen == [False, False, False]
    assert {name.split(".")[1] for name in gradients(model)} == {"2"}


@pytest.mark.parametrize("method", ["lora", "prefix", "freeze", "full"])
def test_every_method_learns(method: str, make_model: Callable[..., Path]) -> None:
    model = load_model(make_model("glm4")).train()
    model.compute = torch.bfloat16
    adapt(model, AdaptSection.model_validate({"method": method, "dropout": 0.0, "prefix_tokens": 8}))
    mover = mover_of(build_optimizer(model.named_parameters(), OptimSection()), clip=1.0)
    assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    step = step_of(samples(4), "pack", 4096)
    losses = [train_step(WholeModel(model, CPU), mover, step, 1e-2).loss for _ in range(30)]
    assert losses[-1] < losses[0] - 0.5
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad or torch.equal(parameter, frozen[name])


def test_a_step_that_is_not_finite_changes_nothing(make_model: Callable[..., Path]) -> None:
    model = load_model(make_model("glm4")).train()
    adapt(model, AdaptSection(method="full"))
    mover = mover_of(build_optimizer(model.named_parameters(), OptimSection()), clip=1.0)
    step = step_of(samples(4), "pack", 4096)
    assert train_step(WholeModel(model, CPU), mover, step, 1e-3).applied
    before = [parameter.clone() for parameter in model.parameters()]
    poisoned = model.layers[1].mlp.down_proj.weight
    healthy = poisoned.data.clone()
    poisoned.data[0, 0] = float("nan")
    outcome = train_step(WholeModel(model, CPU), mover, step, 1e-3)
    poisoned.data.copy_(healthy)
    assert not outcome.applied
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))
    assert train_step(WholeModel(model, CPU), mover, step, 1e-3).applied
