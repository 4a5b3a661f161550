"""AdamW in C++, where this machine can build it: against its definition in float64, and torch's own."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from glm_accelerate.config.schema import AdaptSection, OptimSection
from glm_accelerate.kernels.native import build
from glm_accelerate.models.adapt import adapt
from glm_accelerate.models.bind import bind_operators
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.linear import Linear
from glm_accelerate.models.weights import load_model
from glm_accelerate.optim.build import build_optimizer
from glm_accelerate.optim.mover import mover_of
from glm_accelerate.optim.one_pass import OnePassAdamW, keep_copies

pytestmark = pytest.mark.skipif(build.lacking() is not None, reason=f"no native operators: {build.lacking()}")
SECTION = OptimSection(weight_decay=0.1, betas=(0.9, 0.95))
WIDTHS = {"hidden_size": 64, "intermediate_size": 48}  # our operators take sixteen numbers at a time
SHAPES = ((300, 131), (17,), (1, 1), (64, 1024))  # more than one piece of work, and ends of all lengths


@pytest.fixture(autouse=True)
def _ready() -> None:
    assert build.load() is None


def weights(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def give(held: list[nn.Parameter], step: int, dtype: torch.dtype) -> None:
    """The gradients of a step, as bfloat16 holds them; some are nothing, as those of words not seen."""
    generator = torch.Generator().manual_seed(step)
    for weight in held:
        gradient = torch.randn(weight.shape, generator=generator) * 10 ** -(step % 5)
        weight.grad = gradient.bfloat16().to(dtype)
        weight.grad[:1] = 0


def trained(held: list[nn.Parameter], native: bool, dtype: torch.dtype, factor: float = 0.37) -> list[Tensor]:
    optimizer = build_optimizer([(str(i), weight) for i, weight in enumerate(held)], SECTION, native=native)
    assert isinstance(optimizer, OnePassAdamW) == native
    for step in range(12):
        give(held, step, dtype)
        mover = mover_of(optimizer, clip=1.0)
        mover.begin(1e-2 / (step + 1))
        mover.move(torch.tensor(1 / factor - 1e-6, dtype=torch.float64))  # so clipped by the factor
    return [weight.detach() for weight in held]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_exact_as_torch(dtype: torch.dtype) -> None:
    """With clipping by a factor that is no power of two, and gradients in either dtype."""

    def wide_gradients(held: list[nn.Parameter]) -> None:
        for weight in held:
            weight.grad_dtype = dtype

    own = weights()
    wide_gradients(own)
    exact = trained(weights(torch.float64), False, torch.float64)
    for mine, theirs, true in zip(
        trained(own, True, dtype), trained(weights(), False, torch.float32), exact, strict=True
    ):
        allowed = 2 * (theirs - true).abs().max() + torch.finfo(torch.float32).eps * true.abs().max()
        assert (mine - true).abs().max() <= allowed


@pytest.mark.parametrize("threads", [1, 2])
def test_the_norm_is_that_of_all_gradients(threads: int) -> None:
    held = weights()
    held[0].grad_dtype = torch.bfloat16
    give(held[:1], 0, torch.bfloat16)
    give(held[2:], 1, torch.float32)  # the second has none
    exact = sum(w.grad.double().square().sum() for w in held if w.grad is not None)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    optimizer = OnePassAdamW([{"params": held}], lr=0.0, betas=(0.9, 0.999), eps=1e-8)
    found = mover_of(optimizer).norm(4.0)
    torch.set_num_threads(before)
    assert found.item() == pytest.approx(float(exact) ** 0.5 / 4, rel=1e-5)
    assert held[0].grad is not None
    held[0].grad[3, 7] = float("nan")
    assert mover_of(optimizer).norm().isnan()
    optimizer.zero_grad()
    assert mover_of(optimizer).norm() == 0  # a step without targets


def test_a_run_goes_on_with_either() -> None:
    """Its state is torch's: three steps with one and three with the other are six."""

    def run(first: bool, second: bool) -> list[Tensor]:
        held = weights()
        named = [(str(i), weight) for i, weight in enumerate(held)]
        optimizer = build_optimizer(named, SECTION, native=first)
        for step in range(6):
            if step == 3:
                saved = {key: value.clone() for key, value in mover_of(optimizer).state(named).items()}
                optimizer = build_optimizer(named, SECTION, native=second)
                mover_of(optimizer).load(named, saved)
            give(held, step, torch.float32)
            mover_of(optimizer).begin(1e-2)
            mover_of(optimizer).move(torch.ones(()))
        return [weight.detach() for weight in held]

    alone = run(True, True)
    for one, other in ((True, False), (False, True), (False, False)):
        for mine, theirs in zip(alone, run(one, other), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.fixture
def model(make_model: Callable[..., Path]) -> Decoder:
    """All of it is trained, by our own operators."""
    made = load_model(make_model("glm4", **WIDTHS), dtype=torch.float32).train()
    made.compute = torch.bfloat16
    adapt(made, AdaptSection(method="full"))
    bind_operators(made, compiled=True)
    assert made.form == "native"
    return made


def copied(model: Decoder) -> list[Linear]:
    return [part for part in model.modules() if isinstance(part, Linear) and part.copy is not None]


def test_copies_are_the_weights_to_the_last_bit(model: Decoder) -> None:
    """After steps of ours, which torch does not count, and after changes of others, which it does."""
    optimizer = build_optimizer(model.named_parameters(), SECTION, native=True)
    keep_copies(optimizer, model)
    layers = copied(model)
    assert len(layers) == 6 * len(model.layers) + 1  # q, k, v, o, gate and up, down; the head
    tokens = torch.arange(48)[None] % 100
    for step in range(3):
        model(tokens).float().square().mean().backward()
        before = [layer.weight.detach().clone() for layer in layers]
        mover = mover_of(optimizer, clip=1.0)
        mover.begin(1e-2)
        mover.move(mover.norm())
        mover.end()
        assert not any(torch.equal(layer.weight, then) for layer, then in zip(layers, before, strict=True))
        for layer in layers:
            assert layer.copy is not None
            assert torch.equal(layer.copy, layer.weight.bfloat16()), step
    place = layers[0].copy
    with torch.no_grad():
        layers[0].weight.mul_(3)
    assert layers[0].copy is place  # the optimizer goes on writing there
    assert place is not None
    assert torch.equal(place, layers[0].weight.bfloat16())


def test_gradients_by_a_copy_are_those_of_the_weight(model: Decoder) -> None:
    tokens = torch.arange(48)[None] % 100

    def gradients() -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        model(tokens).float().square().mean().backward()
        return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}

    plain = gradients()
    keep_copies(build_optimizer(model.named_parameters(), SECTION, native=True), model)
    for dtype in (torch.bfloat16, torch.float32):
        model.zero_grad(set_to_none=True)
        for layer in copied(model):
            layer.learn_in(dtype)
        found = gradients()
        assert found.keys() == plain.keys()
        assert {found[name].dtype for name in found if name.endswith("proj.weight")} == {dtype}
        assert all(torch.equal(found[name].float(), plain[name]) for name in plain)


def test_a_weight_that_two_have_is_not_copied(make_model: Callable[..., Path]) -> None:
    """As a head that is the embedding: one gradient is float32, and lookups want float32."""
    model = load_model(make_model("glm4", **WIDTHS), dtype=torch.float32).train()
    model.compute = torch.bfloat16
    model.head.weight = model.embed
    adapt(model, AdaptSection(method="full"))
    bind_operators(model, compiled=True)
    keep_copies(build_optimizer(model.named_parameters(), SECTION, native=True), model)
    assert model.head.copy is None
    assert model.layers[0].mlp.down_proj.copy is not None
