"""A divided model's weights, read in parts: the same to the last bit as the whole model, divided."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from glm_accelerate.models.adapt import LoraSettings, add_lora
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.layout import Layout
from glm_accelerate.models.weights import load_model, part_reader
from glm_accelerate.parallel.part import whole
from glm_accelerate.parallel.place import Axes, Place
from glm_accelerate.parallel.ranks import Ranks, leave
from glm_accelerate.parallel.shard import fill, shard
from glm_accelerate.parallel.table import CutTable

RANKS = 3  # by which 131 rows, 60 and 2 do not divide
CPU = torch.device("cpu")


def prepared(directory: Path, device: str) -> Decoder:
    model = load_model(directory, dtype=torch.float32, device=device)
    add_lora(model, LoraSettings(rank=2), seed=3)
    return model


def compare(rank: int, directory: Path, meeting: Path) -> None:
    store = dist.FileStore(str(meeting), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    model, plain = prepared(directory, "meta"), prepared(directory, "cpu")
    place = Place(Ranks(rank, RANKS), Axes(shard=RANKS))
    shard(model, list(model.layers), ["hidden"], place.mesh(CPU))
    fill(model, part_reader(model), CPU, CutTable(place=place))
    theirs = dict(plain.named_parameters())
    assert theirs.keys() == dict(model.named_parameters()).keys()
    for turn in range(2):  # before FSDP has taken them up, and after
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad == theirs[name].requires_grad
            assert torch.equal(whole(parameter.detach()), theirs[name]), (turn, name)
        tokens = torch.arange(10).view(1, 10)
        layout = Layout.of_documents([(10,)], CPU)
        assert torch.equal(model.hidden(tokens, layout), plain.hidden(tokens, layout))
    leave(store, RANKS)


@pytest.mark.parametrize(("family", "tied"), [("glm4", False), ("glm4", True), ("chatglm", False)])
def test_parts_are_what_the_whole_divides_into(
    family: str, tied: bool, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    changes = {"tie_word_embeddings": tied} if family == "glm4" else {}
    directory = make_model(family, **changes)
    mp.start_processes(
        compare, args=(directory, tmp_path / "meeting"), nprocs=RANKS, start_method="forkserver"
    )
