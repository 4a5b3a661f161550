"""Frozen weights come and go with their block: the same bits, in order, two blocks at once at most."""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from glm_accelerate.config.schema import AdaptSection
from glm_accelerate.memory.frozen import FrozenWeights
from glm_accelerate.memory.offload import offload_activations
from glm_accelerate.memory.stream import Copy, Lane
from glm_accelerate.models.adapt import adapt
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.layout import Layout
from glm_accelerate.models.weights import load_model

CPU = torch.device("cpu")


def loss_of(model: Decoder) -> Tensor:
    tokens = torch.randint(131, (2, 48), generator=torch.Generator().manual_seed(3))
    hidden = model.hidden(tokens, Layout.of_documents([(20, 28), (48,)]))
    return model.head(hidden).float().logsumexp(-1).square().mean()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def lora_model(path: Path, quantized: str = "bfloat16") -> Decoder:
    model = load_model(path).train()
    adapt(model, AdaptSection.model_validate({"dropout": 0.3, "base": quantized}), seed=1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(4))
    return model


def here(block: nn.Module) -> int:
    """Bytes of a block's frozen matrices that are on the device."""
    return sum(
        p.untyped_storage().nbytes() for p in block.parameters() if not p.requires_grad and p.nbytes > 1024
    )


@pytest.mark.parametrize("base", ["bfloat16", "int8", "nf4"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activations", [False, True])
def test_losses_and_gradients_are_the_same_bits(
    base: str, recompute: bool, activations: bool, make_model: Callable[..., Path]
) -> None:
    path = make_model("glm4", num_hidden_layers=4)
    model = lora_model(path, base)
    model.recompute = recompute
    torch.manual_seed(7)
    expected = loss_of(model)
    expected.backward()
    wanted = gradients(model)
    with torch.inference_mode():
        judged = loss_of(model.eval())

    model = lora_model(path, base)
    model.recompute = recompute
    frozen = FrozenWeights(model.layers, CPU, least=1024)
    assert all(here(block) == 0 for block in model.layers)
    for _ in range(2):  # a second step finds everything as the first did
        torch.manual_seed(7)
        if activations:
            with offload_activations(model, CPU, least=256, room=1000):
                loss = loss_of(model.train())
        else:
            loss = loss_of(model.train())
        assert torch.equal(loss, expected)
        loss.backward()
        found = gradients(model)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        with torch.inference_mode():
            assert torch.equal(loss_of(model.eval()), judged)
    frozen.close()
    original = lora_model(path, base)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), original.parameters(), strict=True))
    assert torch.equal(loss_of(model.eval()), judged)


class Stack(nn.Module):
    """Frozen matrices and what trains beside them; any module will do."""

    def __init__(self, layers: int = 6, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        for layer in self.layers:
            layer.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.sum()


class Watched(Lane):
    """A lane that remembers whose weights it fetched, and how many were there at once."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(CPU)
        self.blocks, self.order, self.most = blocks, list[int](), 0

    def copy(self, source: Tensor, target: Tensor) -> Copy:
        for number, block in enumerate(self.blocks):
            if target.data_ptr() and any(target.data_ptr() == p.data_ptr() for p in block.parameters()):
                self.order.append(number)
        self.most = max(self.most, sum(here(block) > 0 for block in self.blocks))
        return super().copy(source, target)


def test_a_block_is_fetched_while_its_neighbour_computes() -> None:
    model = Stack()
    lane = Watched(list(model.layers))
    began: list[tuple[int, list[int]]] = []
    FrozenWeights(model.layers, CPU, least=1024, lane=lane)
    for number, layer in enumerate(model.layers):
        layer.register_forward_hook(lambda _, __, ___, n=number: began.append((n, list(lane.order))))
    for _ in range(2):
        model(torch.randn(8, 32)).backward()
        assert all(n == 5 or n + 1 in order for n, order in began)  # the next one was asked for before
        assert lane.order == [*range(6), 4, 3, 2, 1, 0] or lane.order == [*range(1, 6), 4, 3, 2, 1, 0]
        lane.order.clear()
        began.clear()
    assert lane.most == 2
    assert [here(layer) > 0 for layer in model.layers] == [True] + [False] * 5


def test_what_trains_and_what_blocks_share_stays() -> None:
    model = Stack(3)
    model.layers[2].weight = model.layers[1].weight
    FrozenWeights(model.layers, CPU, least=1024)
    assert [here(layer) for layer in model.layers] == [0, 4096, 4096]
    model(torch.randn(8, 32)).backward()
    assert all(layer.bias.grad is not None for layer in model.layers)


def test_a_block_without_a_graph_is_dropped_too() -> None:
    model = Stack()
    for layer in model.layers[:4]:
        layer.bias.requires_grad_(False)
    FrozenWeights(model.layers, CPU, least=1024)
    for _ in range(2):
        model(torch.randn(8, 32)).backward()
        there = [number for number, layer in enumerate(model.layers) if here(layer)]
        assert len(there) <= 2
        assert all(b == a + 1 for a, b in pairwise(there))


def test_the_code_of_the_page_runs() -> None:
    page = Path(__file__).parents[3] / "docs/howto/offload.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, page.name, "exec"), names)
    assert torch.isfinite(names["norm"])  # pyright: ignore[reportArgumentType]
