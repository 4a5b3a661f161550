"""A quantised base divided over ranks: the same bits as the whole one, and the same run."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml

from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.config.schema import AdaptSection
from glm_accelerate.kernels.quantized import Kind
from glm_accelerate.models.adapt import adapt
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.layout import Layout
from glm_accelerate.models.weights import load_model, part_reader
from glm_accelerate.observe.events import read_events
from glm_accelerate.parallel.part import local_of, whole
from glm_accelerate.parallel.place import Axes, Place
from glm_accelerate.parallel.ranks import Ranks, leave
from glm_accelerate.parallel.shard import fill, shard
from glm_accelerate.parallel.table import CutTable
from tests.checkpoints import latest

Said = dict[str, Any]
KINDS: tuple[Kind, ...] = ("nf4", "int8", "fp8")
RANKS = 3  # by which neither 131 nor 60 nor 200 rows divide
CPU = torch.device("cpu")


def prepared(directory: Path, kind: Kind, device: str) -> Decoder:
    model = load_model(directory, dtype=torch.float32, device=device, quantized=kind)
    adapt(model, AdaptSection(rank=2, dropout=0.0, base=kind), seed=3)
    return model


def compare_all(rank: int, directory: Path, meeting: Path) -> None:
    store = dist.FileStore(str(meeting), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    for kind in KINDS:
        compare(rank, directory, kind)
    leave(store, RANKS)


def compare(rank: int, directory: Path, kind: Kind) -> None:
    model, plain = prepared(directory, kind, "meta"), prepared(directory, kind, "cpu")
    place = Place(Ranks(rank, RANKS), Axes(shard=RANKS))
    shard(model, list(model.layers), ["hidden"], place.mesh(CPU))
    fill(model, part_reader(model), CPU, CutTable(place=place))
    theirs = dict(plain.named_parameters())
    assert theirs.keys() == dict(model.named_parameters()).keys()
    held = sum(local_of(parameter).nbytes for parameter in model.parameters())
    assert held < 1.2 / RANKS * sum(parameter.nbytes for parameter in plain.parameters())
    layout = Layout.of_documents([(10,)], CPU)
    for turn in range(2):  # before FSDP has taken them up, and after
        for name, parameter in model.named_parameters():
            assert parameter.dtype == theirs[name].dtype
            assert parameter.requires_grad == theirs[name].requires_grad
            assert torch.equal(whole(parameter.detach()), theirs[name]), (turn, name)
        hidden, wanted = (one.hidden(torch.arange(10).view(1, 10), layout) for one in (model, plain))
        assert torch.equal(hidden, wanted)
        hidden.square().sum().backward()
        wanted.square().sum().backward()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None
                ours, alone = whole(parameter.grad), theirs[name].grad
                assert alone is not None
                torch.testing.assert_close(ours, RANKS * alone)  # every rank ran the same tokens
        model.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("family", ["glm4", "chatglm"])
def test_parts_are_what_the_whole_divides_into(
    family: str, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Each rank reads and packs its own rows, and nothing else."""
    args = make_model(family), tmp_path / "meeting"
    mp.start_processes(compare_all, args=args, nprocs=RANKS, start_method="forkserver")


@pytest.fixture
def config(tiny_run: Said, tmp_path: Path) -> Path:
    """No dropout, whose masks each rank draws for itself, and float32, in which sums can be compared."""
    said = {
        **tiny_run,
        "adapt": {"method": "lora", "rank": 4, "dropout": 0.0},
        "train": {"steps": 8, "step_samples": 4},
        "optim": {"learning_rate": 1e-3},
        "precision": {"compute": "float32"},
        "checkpoint": {"every": 4, "wait": True},
        "evaluate": {"every": 8},
    }
    path = tmp_path / "quantized.yaml"
    path.write_text(yaml.safe_dump(said))
    return path


def figures(run: Path) -> list[tuple[float, float]]:
    steps = [event for event in read_events(run / "events.jsonl") if event["kind"] == "step"]
    return [(float(str(event["loss"])), float(str(event["grad_norm"]))) for event in steps]


def state(run: Path) -> dict[str, torch.Tensor]:
    found, _ = latest(run)
    assert found is not None
    reader = Reader(found)
    return {f"{group}/{n}": t for group in ("weights", "optimizer") for n, t in reader.group(group).items()}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("nf4", "shard=full"), ("fp8", "shard=full"), ("nf4", "pipeline=2"), ("int8", "tensor=2")],
)
def test_two_ranks_learn_what_one_learns(
    kind: Kind, layout: str, config: Path, tmp_path: Path, go: Callable[..., str]
) -> None:
    go(config, tmp_path / "one", 1, f"adapt.base={kind}")
    go(config, tmp_path / "two", 2, f"adapt.base={kind}", f"parallel.{layout}")
    one, two = figures(tmp_path / "one"), figures(tmp_path / "two")
    assert len(one) == len(two) == 8
    for (loss, norm), (its_loss, its_norm) in zip(one, two, strict=True):
        assert its_loss == pytest.approx(loss, rel=1e-5)
        assert its_norm == pytest.approx(norm, rel=1e-4)


def test_two_ranks_resumed_end_with_the_same_bits(
    config: Path, tmp_path: Path, go: Callable[..., str]
) -> None:
    more = ["adapt.base=int8", "adapt.dropout=0.2", "parallel.shard=full", "checkpoint.keep_last=9"]
    go(config, tmp_path / "whole", 2, *more)
    shutil.copytree(tmp_path / "whole", tmp_path / "again", symlinks=True)
    go(config, tmp_path / "again", 2, *more, "--resume", "4")
    one, other = state(tmp_path / "whole"), state(tmp_path / "again")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert {name.rpartition(".")[2] for name in one if name.startswith("weights/")} == {"lora_A", "lora_B"}
    assert figures(tmp_path / "again") == figures(tmp_path / "whole")
