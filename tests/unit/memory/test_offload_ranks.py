"""Activations of a model that is divided over ranks: they leave and come back, gathered weights never do."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from glm_accelerate.memory.offload import offload_activations
from glm_accelerate.memory.stream import Copy, Lane
from glm_accelerate.models.adapt import LoraSettings, add_lora
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.layout import Layout
from glm_accelerate.models.weights import load_model
from glm_accelerate.parallel.part import whole
from glm_accelerate.parallel.place import Axes, Place
from glm_accelerate.parallel.ranks import Ranks, leave
from glm_accelerate.parallel.shard import shard

RANKS = 2
CPU = torch.device("cpu")


class Watched(Lane):
    """A lane that adds up what it moved."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.moved = 0

    def to_host(self, tensor: Tensor) -> Copy:
        self.moved += tensor.nbytes
        return super().to_host(tensor)


def learn(model: Decoder, lane: Watched) -> dict[str, Tensor]:
    layout = Layout.of_documents([(20, 28)], CPU)
    with offload_activations(model, CPU, least=1024, room=1, lane=lane):
        hidden = model.hidden(torch.arange(48)[None], layout)
    hidden.square().sum().backward()
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def compare_both(rank: int, directory: Path, meeting: Path) -> None:
    store = dist.FileStore(str(meeting), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    for lora in (False, True):
        compare(directory, lora, rank)
    leave(store, RANKS)


def compare(directory: Path, lora: bool, rank: int) -> None:
    found: list[tuple[dict[str, Tensor], int]] = []
    for divided in (False, True):
        model = load_model(directory, dtype=torch.float32).requires_grad_(True)
        if lora:
            add_lora(model, LoraSettings(rank=2, dropout=0.0), seed=3)
        if divided:
            shard(
                model, list(model.layers), ["hidden"], Place(Ranks(rank, RANKS), Axes(shard=RANKS)).mesh(CPU)
            )
        lane = Watched()
        found.append((learn(model, lane), lane.moved))
    (alone, moved), (together, moved_together) = found
    assert alone.keys() == together.keys()
    for name, gradient in alone.items():
        torch.testing.assert_close(together[name], RANKS * gradient)  # every rank ran the same tokens
    assert moved == moved_together > 0


@pytest.mark.process
def test_gathered_weights_stay(make_model: Callable[..., Path], tmp_path: Path) -> None:
    args = make_model("glm4"), tmp_path / "meeting"
    mp.start_processes(compare_both, args=args, nprocs=RANKS, start_method="forkserver")
