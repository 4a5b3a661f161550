"""Ranks that share long documents are one process: loss, every gradient, their norm, steps of weights."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml

from glm_accelerate.data.order import Order
from glm_accelerate.data.pipeline import steps
from glm_accelerate.data.types import FilePlace, Sample, Step
from glm_accelerate.observe.events import read_events
from glm_accelerate.parallel.place import Axes, Place
from glm_accelerate.parallel.ranks import Ranks, leave
from tests.distributed.one_process import MODELS, STEPS, same_as_one

Said = dict[str, Any]
LIMIT = 64  # tokens of a pass
DATA = {
    "one long document": [331],
    "cut documents among whole ones": [7, 201, 30, 64, 1, 97, 15, 22],
}
LAYOUTS: dict[str, tuple[Axes, Sequence[int]]] = {
    "context 2": (Axes(data=2, context=2), ()),
    "context 3": (Axes(data=3, context=3), ()),
    "context 4": (Axes(data=4, context=4), ()),
    "data 4, context 2": (Axes(data=4, context=2), ()),
    "shard 4, context 2": (Axes(shard=4, context=2), ()),
    "data 2, shard 2, context 4": (Axes(data=2, shard=2, context=4), ()),
    "data 2, context 2, tensor 2": (Axes(data=2, context=2, tensor=2), ()),
    "data 2, context 2, pipeline 2": (Axes(data=2, context=2, pipeline=2), (1, 1)),
}


@dataclass(frozen=True)
class Made:
    """Samples of these lengths, of whose tokens some are learnt: of later ones more."""

    lengths: Sequence[int]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Sample:
        draw, length = np.random.default_rng(number), self.lengths[number]
        targets = draw.random(length) < 0.1 + 0.8 * number / len(self.lengths)
        return Sample(draw.integers(0, 96, length).astype(np.int32), targets, FilePlace("made", number))


def laid(lengths: Sequence[int], place: Place) -> list[Step]:
    """Steps as a run makes them."""
    order = Order(np.array(lengths, np.int32), ((0, len(lengths), 1.0),), 0, len(lengths))
    (rank, ranks), context = place.samples, place.axes.context
    samples = Made(lengths)
    made = steps(
        samples,
        order,
        batching="pack",
        micro_tokens=LIMIT,
        position=0,
        total=STEPS,
        rank=rank,
        ranks=ranks,
        context=context,
    )
    data = list(made)
    if context > 1:
        cut = any(batch.pieces for step in data for batch in step.batches)
        assert place.total([cut])[0] >= context
    return data


def one_rank(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "meeting"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    for layout, (axes, layers) in LAYOUTS.items():
        if axes.count(*axes.sizes) != ranks:
            continue
        for what, lengths in DATA.items():
            for method, recompute in (("full", False), ("full", True), ("lora", False)):
                same_as_one(
                    Place(Ranks(rank, ranks, store), axes),
                    replace(MODELS["glm4"], layers=2),
                    method,
                    f"{layout}, {what}, {method}, {recompute}",
                    layers,
                    partial(laid, lengths),
                    recompute,
                )
    leave(store, ranks)


@pytest.mark.process
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shared_documents_are_one_process(ranks: int, tmp_path: Path) -> None:
    mp.start_processes(one_rank, args=(ranks, tmp_path), nprocs=ranks, start_method="forkserver")


@pytest.fixture
def said(tiny_run: Said, tmp_path: Path) -> Path:
    """Passes that hold a third of the longest conversations, of those held out too."""
    for name in ("train", "dev"):
        path = tmp_path / f"{name}.jsonl"
        long = [
            [
                {"role": "user", "content": "Say in German: " + " and ".join(["red", "green"] * count)},
                {"role": "assistant", "content": " ".join(["rot", "gruen"] * count)},
            ]
            for count in (20, 33, 41)
        ]
        lines = "".join(json.dumps({"messages": messages}) + "\n" for messages in long)
        path.write_text(path.read_text(encoding="utf-8") + lines, encoding="utf-8")
    config: Said = {
        **tiny_run,
        "adapt": {"method": "full"},
        "data": {**tiny_run["data"], "max_tokens": 1024},
        "train": {"steps": 8, "step_samples": 6, "micro_tokens": 64},
        "optim": {"learning_rate": 1e-3, "schedule": "constant", "epsilon": 1e-3},
        "precision": {"compute": "float32", "compile": "off"},
        "evaluate": {"every": 4, "where": "inline", "metrics": ["loss"]},
        "checkpoint": {"every": 4, "wait": True},
    }
    path = tmp_path / "long.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def figures(run: Path) -> dict[str, list[float]]:
    """Losses and norms of all steps, and held-out losses."""
    events = list(read_events(run / "events.jsonl"))
    steps = [event for event in events if event["kind"] == "step"]
    return {
        "loss": [event["loss"] for event in steps],
        "norm": [event["grad_norm"] for event in steps],
        "eval": [event["loss"] for event in events if event["kind"] == "eval"],
    }


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(3, "context=3 parallel.shard=off"), (4, "context=2"), (4, "context=2 parallel.tensor=2")],
)
def test_a_run_with_long_documents_is_that_of_one_process_and_goes_on_at_any_layout(
    ranks: int, layout: str, said: Path, tmp_path: Path, go: Callable[..., str]
) -> None:
    run, words = tmp_path / "many", f"parallel.{layout}".split()
    go(said, tmp_path / "one", 1)
    go(said, run, ranks, *words, "train.steps=4")
    assert json.loads((run / "plan.json").read_text())["micro_tokens"] == LIMIT
    go(said, run, 2, "parallel.context=2", "train.steps=6", "--accept-changes")
    go(said, run, 1, "--accept-changes")
    expected, found = figures(tmp_path / "one"), figures(run)
    assert len(found["loss"]) == 8
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["norm"] == pytest.approx(expected["norm"], rel=1e-4)
    assert found["eval"][:2] == pytest.approx(expected["eval"][:2], rel=1e-5)
