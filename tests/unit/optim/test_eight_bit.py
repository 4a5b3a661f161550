"""AdamW with moments in eight bits: as good as float32, a quarter of the room, plain in files."""

import sys
from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from glm_accelerate.checkpoint.format import DTYPES
from glm_accelerate.data.pack import ARRANGE
from glm_accelerate.data.pipeline import collate
from glm_accelerate.data.types import FilePlace, Sample, Step
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.weights import load_model
from glm_accelerate.optim.build import adamw_8bit
from glm_accelerate.optim.host import HostOptimizer
from glm_accelerate.optim.mover import FusedMover, mover_of
from glm_accelerate.optim.state import put_together, take_apart
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.training.step import WholeModel

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def eager() -> Generator[None, None, None]:
    """Compiled updates take seconds to make and are the benchmark's subject."""
    with torch.compiler.set_stance("force_eager"):
        yield


def step_of(seed: int = 0) -> Step:
    generator = np.random.default_rng(seed)
    taken: list[Sample] = []
    for _ in range(6):
        length = int(generator.integers(20, 50))
        tokens = ((np.arange(length) * 7 + generator.integers(0, 5)) % 131).astype(np.int32)
        taken.append(Sample(tokens, np.ones(length, np.bool_), FilePlace("made", 1)))
    made = ARRANGE["pack"]([len(sample) for sample in taken], 4096)
    batches = tuple(collate(arrangement, taken) for arrangement in made)
    return Step(
        1, 0, batches, tuple(range(6)), sum(b.tokens for b in batches), sum(b.targets for b in batches)
    )


def groups_of(model: nn.Module) -> list[dict[str, object]]:
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.ndim > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]


def made(model: nn.Module) -> Optimizer:
    return adamw_8bit(groups_of(model), lr=3e-3, betas=(0.9, 0.999), eps=1e-8)


def run(model: Decoder, optimizer: Optimizer, first: int, last: int) -> list[float]:
    losses: list[float] = []
    for number in range(first, last):
        losses.append(WholeModel(model, CPU)(step_of(number)).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.fixture
def model_dir(make_model: Callable[..., Path]) -> Path:
    return make_model("glm4", hidden_size=64, intermediate_size=96)


def opened(path: Path) -> Decoder:
    return load_model(path).train().requires_grad_(True)


def test_it_learns_as_adamw_does(model_dir: Path) -> None:
    model = opened(model_dir)
    wide = run(model, AdamW(groups_of(model), lr=3e-3, fused=True), 0, 40)
    model = opened(model_dir)
    narrow = run(model, made(model), 0, 40)
    assert wide[-1] < wide[0] - 2
    fell = wide[0] - wide[-1]
    assert all(abs(a - b) < 0.05 * fell for a, b in zip(wide, narrow, strict=True))
    assert wide != narrow


def test_state_takes_two_bytes_a_weight_where_it_is_packed(model_dir: Path) -> None:
    model = opened(model_dir)
    optimizer = made(model)
    run(model, optimizer, 0, 1)
    state = mover_of(optimizer).state(model.named_parameters())
    name = "layers.0.mlp.gate_up_proj.weight"
    weight = model.get_parameter(name)
    taken = sum(part.nbytes for key, part in state.items() if key.startswith(name + "::exp"))
    assert taken == pytest.approx(weight.numel() * (2 + 2 * 4 / 256))
    assert state["norm.weight::exp_avg"].dtype == torch.float32  # too small to pack


def test_a_resumed_run_goes_on_bit_for_bit(model_dir: Path) -> None:
    whole = opened(model_dir)
    run(whole, made(whole), 0, 9)
    half = opened(model_dir)
    optimizer = made(half)
    run(half, optimizer, 0, 4)
    saved = {key: value.clone() for key, value in mover_of(optimizer).state(half.named_parameters()).items()}
    assert all(type(value) is Tensor and value.is_contiguous() for value in saved.values())
    assert {str(value.dtype) for value in saved.values()} <= {
        f"torch.{dtype}" for dtype, _ in DTYPES.values()
    }
    again = opened(model_dir)
    resumed = made(again)
    again.load_state_dict(half.state_dict())
    mover_of(resumed).load(again.named_parameters(), saved)
    run(again, resumed, 4, 9)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


def test_a_moment_is_put_together_to_the_same_bits() -> None:
    weight = nn.Parameter(torch.randn(64, 128))
    optimizer = adamw_8bit([{"params": [weight]}], lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
    for _ in range(3):
        weight.grad = torch.randn(64, 128)
        optimizer.step()
    state = optimizer.state[weight]
    parts: dict[str, Tensor] = {}
    for key in ("exp_avg", "exp_avg_sq"):
        parts |= take_apart(key, state[key])
    assert sorted(parts) == ["exp_avg.codes", "exp_avg.scales", "exp_avg_sq.codes", "exp_avg_sq.scales"]
    again = put_together(parts)
    for key in ("exp_avg", "exp_avg_sq"):
        assert type(again[key]) is type(state[key])
        assert torch.equal(again[key].dequantize(), state[key].dequantize())
        assert again[key].signed == state[key].signed


def test_it_goes_with_the_update_in_the_backward_pass_and_on_the_host(model_dir: Path) -> None:
    plain, fused, moved = (opened(model_dir) for _ in range(3))
    run(plain, made(plain), 0, 3)
    bound = FusedMover(made(fused), fused.parameters())
    host = HostOptimizer(
        groups_of(moved), lambda groups: adamw_8bit(groups, lr=3e-3, betas=(0.9, 0.999), eps=1e-8), CPU
    )
    for number in range(3):
        bound.begin(3e-3)
        WholeModel(fused, CPU)(step_of(number))
        WholeModel(moved, CPU)(step_of(number))
        host.step()
    for a, b, c in zip(plain.parameters(), fused.parameters(), moved.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_without_torchao_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(UserError, match="pip install torchao"):
        adamw_8bit([{"params": [nn.Parameter(torch.zeros(2))]}], lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
