"""Activations leave and come back: the same bits, once each, in time, and never more than the room allows."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from glm_accelerate.config.schema import AdaptSection
from glm_accelerate.memory.offload import _Tape, _View, offload_activations
from glm_accelerate.memory.stream import Copy, Lane
from glm_accelerate.models.adapt import adapt
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.layout import Layout
from glm_accelerate.models.weights import load_model

CPU = torch.device("cpu")


class Watched(Lane):
    """A lane that remembers which memory it read and wrote."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.left: list[tuple[StorageWeakRef, int]] = []
        self.came: list[tuple[StorageWeakRef, int]] = []
        self.most = 0

    def to_host(self, tensor: Tensor) -> Copy:
        self.left.append((StorageWeakRef(tensor.untyped_storage()), tensor.nbytes))
        return super().to_host(tensor)

    def to_device(self, tensor: Tensor) -> Copy:
        copy = super().to_device(tensor)
        self.came.append((StorageWeakRef(copy.result.untyped_storage()), tensor.nbytes))
        self.most = max(self.most, alive(self.came))
        return copy


def alive(seen: list[tuple[StorageWeakRef, int]]) -> int:
    return sum(size for storage, size in seen if not storage.expired())


def loss_of(model: Decoder) -> Tensor:
    tokens = torch.randint(131, (2, 48), generator=torch.Generator().manual_seed(3))
    hidden = model.hidden(tokens, Layout.of_documents([(20, 28), (48,)]))
    return model.head(hidden).float().logsumexp(-1).square().mean()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("family", ["chatglm", "glm4"])
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recompute", [False, True])
def test_losses_and_gradients_are_the_same_bits(
    family: str, method: str, compute: torch.dtype, recompute: bool, make_model: Callable[..., Path]
) -> None:
    model = load_model(make_model(family)).train()
    adapt(model, AdaptSection.model_validate({"method": method, "dropout": 0.3}), seed=1)
    for parameter in model.parameters():
        if parameter.requires_grad and method == "lora":
            nn.init.normal_(parameter, std=0.1)
    model.compute, model.recompute = compute, recompute
    torch.manual_seed(7)
    expected = loss_of(model)
    expected.backward()
    wanted = gradients(model)
    for room in (1, 10_000, 2**28):
        lane = Watched()
        torch.manual_seed(7)
        with offload_activations(model, CPU, least=256, room=room, lane=lane):
            loss = loss_of(model)
        assert torch.equal(loss, expected)
        loss.backward()
        found = gradients(model)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert len(lane.left) > 3
        assert (len(lane.came) > 3) == (room < 2**28)  # what fits into the room never goes


class Stack(nn.Module):
    """Layers that each save their input alone."""

    def __init__(self, layers: int = 12, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def test_memory_is_given_back_and_fetched_again_within_the_room() -> None:
    model, one = Stack(), 64 * 32 * 4  # bytes of an activation
    lane = Watched()
    with offload_activations(model, CPU, least=1, room=2 * one, lane=lane):
        loss = model(torch.randn(64, 32))
    assert [size for _, size in lane.left] == [one] * 12
    assert alive(lane.left) == 2 * one
    loss.backward()
    assert len(lane.came) == 10
    assert lane.most <= 4 * one  # two on their way, one in use, and one whose user has not let go of it yet
    del loss
    assert alive(lane.left) == alive(lane.came) == 0


def test_what_is_needed_next_is_on_its_way_before() -> None:
    model, lane = Stack(), Watched()
    fetched: list[int] = []
    for layer in model.layers:
        layer.register_forward_hook(
            lambda _, __, out: out.register_hook(lambda _: fetched.append(len(lane.came))) and None
        )
    with offload_activations(model, CPU, least=1, room=1, lane=lane):
        loss = model(torch.randn(64, 32))
    loss.backward()
    # Before a layer needs its input the layer above it has asked for it; the last one's never left.
    assert fetched == [0, *range(1, 12)]


def test_views_of_one_piece_of_memory_travel_once() -> None:
    lane, x = Watched(), torch.randn(64, 96, requires_grad=True)
    expected = [None, None]
    for number, room in enumerate((None, 1)):
        x.grad = None
        whole = x * 2
        q, k, v = whole.split(32, dim=-1)
        model = nn.Module()
        if room is None:
            ((q * k).exp() @ (v.T @ q)).sum().backward()
        else:
            with offload_activations(model, CPU, least=1, room=room, lane=lane):
                loss = ((q * k).exp() @ (v.T @ q)).sum()
            loss.backward()
        expected[number] = x.grad
    assert torch.equal(expected[0], expected[1])
    sizes = [size for _, size in lane.left]
    assert sizes.count(whole.nbytes) == 1
    assert len(sizes) == 3  # and the two that are multiplied last


def test_memory_that_was_written_to_is_another_piece() -> None:
    tape = _Tape(nn.Module(), CPU, 1, 1, Lane(CPU))
    memory = torch.zeros(2, 64)
    first = tape.pack(memory[0])
    memory[1] = 1
    second = tape.pack(memory[1])
    memory[1] = 2
    assert isinstance(first, _View)
    assert isinstance(second, _View)
    tape.pack(torch.zeros(64))  # so that the others have left
    assert torch.equal(tape.unpack(first), torch.zeros(64))
    assert torch.equal(tape.unpack(second), torch.ones(64))


def test_parameters_buffers_and_small_tensors_stay() -> None:
    model, lane = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32)), Watched()
    own = {StorageWeakRef(t.untyped_storage()) for t in (*model.parameters(), *model.buffers())}
    with offload_activations(model, CPU, least=64 * 32 * 4, room=1, lane=lane):
        loss = model(torch.randn(64, 32)).square().sum()
    loss.backward()
    assert lane.left
    assert not own & {storage for storage, _ in lane.left}
    assert {size for _, size in lane.left} == {64 * 32 * 4}


def test_a_graph_may_be_walked_twice() -> None:
    model = Stack()
    with offload_activations(model, CPU, least=1, room=1):
        loss = model(torch.randn(64, 32))
    loss.backward(retain_graph=True)
    once = gradients(model)
    loss.backward()
    twice = gradients(model)
    assert all(torch.equal(once[name], twice[name]) for name in once)


def test_a_device_by_another_name_is_the_same_device() -> None:
    """`cuda` is `cuda:0` to its tensors, as `cpu:0` is `cpu`: what is saved there leaves all the same."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    lane = Watched()
    with offload_activations(model, torch.device("cpu:0"), least=1, room=1, lane=lane):
        model(torch.randn(8, 64, requires_grad=True)).sum()
    assert lane.left


@pytest.mark.skipif(torch.cuda.is_available(), reason="here no memory can be pinned")
def test_host_memory_that_cannot_be_pinned_is_used_as_it_is() -> None:
    lane = Lane(CPU)
    lane.stream = object()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.warns(UserWarning, match="cannot be pinned"):
        memory = lane.on_host(torch.ones(4))
    assert memory.shape == (4,)
    assert not memory.is_pinned()
