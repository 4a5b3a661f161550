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
import torch.multiprocessing as mp
import yaml
from torch import Tensor

from glm_accelerate.data.order import Order
from glm_accelerate.data.pack import Dealing, arranged
from glm_accelerate.data.pipeline import collate, steps
from glm_accelerate.data.types import Batch, FilePlace, Sample, Step
from glm_accelerate.kernels.native.build import lacking
from glm_accelerate.models.bind import compute_in
from glm_accelerate.models.layout import Layout
from glm_accelerate.observe.events import read_events
from glm_accelerate.parallel.place import SINGLE, Axes, Place
from glm_accelerate.parallel.ranks import leave
from glm_accelerate.parallel.sums import GradientSums
from glm_accelerate.training.step import forward_backward_of
from tests.distributed.one_process import CPU, MODELS, STEPS, divide, joined, model_of, same_as_one

Said = dict[str, Any]
LIMIT = 64  # tokens of a pass
DATA: dict[str, tuple[int, ...]] = {
    "one long document": (331,),
    "cut documents among whole ones": (7, 201, 30, 64, 1, 97, 15, 22),
}
WAYS = {  # family, method, recompute
    "one long document": (("glm4", "full", False),),
    "cut documents among whole ones": (
        ("glm4", "full", False),
        ("glm4", "full", True),
        ("glm4", "lora", False),
        ("glm4", "prefix", False),
        ("chatglm", "full", False),
    ),
}
LAYOUTS: dict[str, tuple[Axes, Sequence[int]]] = {
    "data 2": (Axes(data=2), ()),
    "data 3": (Axes(data=3), ()),
    "shard 3": (Axes(shard=3), ()),
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
    """Steps as a run makes them, where those who share documents take less the further they are behind."""
    order = Order(np.array(lengths, np.int32), ((0, len(lengths), 1.0),), 0, len(lengths))
    (rank, ranks), context = place.samples, place.axes.context
    speeds = tuple(1 / (1 + at // context) for at in range(ranks))
    samples, dealing = Made(lengths), Dealing(0.02, speeds, together=place.count("shard") > 1)
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
        dealing=dealing,
    )
    data = list(made)
    if context > 1:
        cut = any(batch.pieces for step in data for batch in step.batches)
        assert place.total([cut])[0] >= context
    return data


def one_rank(rank: int, ranks: int, folder: Path) -> None:
    here = joined(rank, ranks, folder)
    data = {what: partial(laid, lengths) for what, lengths in DATA.items()}
    for layout, (axes, layers) in LAYOUTS.items():
        if axes.count(*axes.sizes) != ranks:
            continue
        for what, steps_of in data.items():
            for family, method, recompute in WAYS[what]:
                if family == "chatglm" and axes.query > 1:
                    continue  # its one matrix of queries and keys is not divided so far
                same_as_one(
                    Place(here, axes),
                    replace(MODELS[family], layers=2),
                    method,
                    f"{layout}, {what}, {family}, {method}, {recompute}",
                    layers,
                    steps_of,
                    recompute,
                )
    place = Place(here, Axes(data=ranks, context=ranks))
    isolated(place)
    if lacking() is None:
        native(place)
    assert here.store is not None
    leave(here.store, ranks)


def native(place: Place) -> None:
    """In bfloat16 by our own C++: no further from float64 than one process is, by the house rule."""
    sizes = replace(MODELS["glm4"], width=64, mlp_width=64)
    found: list[dict[str, Tensor]] = []
    exact, alone, shared = model_of(sizes, "full"), model_of(sizes, "full"), model_of(sizes, "full")
    for model, at in ((exact, SINGLE), (alone, SINGLE), (shared, place)):
        if model is not exact:
            compute_in(model.float(), torch.bfloat16, compiled=True)
            assert model.form == "native"
        table = divide(model, at)
        forward_backward_of(model, CPU, at)(laid(DATA["one long document"], at)[0])
        GradientSums(table).finish()
        found.append({name: weight.grad.double() for name, weight in table.weights.items()})
    for name, true in found[0].items():
        mine, theirs = ((one[name] - true).abs().max() for one in (found[2], found[1]))
        assert mine <= 2 * theirs + torch.finfo(torch.bfloat16).eps * true.abs().max(), name


@torch.no_grad()
def isolated(place: Place) -> None:
    """Documents never see each other, cut or whole; and a cut one needs its keys and positions."""
    lengths, ranks = (130, 20, 175, 31), place.count("data")
    documents = [Made(lengths)[number].tokens for number in range(len(lengths))]
    one, model = (model_of(MODELS["glm4"], "full").eval() for _ in range(2))
    divide(model, place)
    alone = [one.hidden(torch.from_numpy(tokens)[None].long(), whole(len(tokens)))[0] for tokens in documents]

    def together(
        documents: Sequence[np.ndarray], layout_of: Callable[[Batch], Layout] = layout_of
    ) -> list[Tensor]:
        """Of each document what all ranks make of it."""
        samples = [Sample(tokens, np.ones(len(tokens), np.bool_), FilePlace("", 0)) for tokens in documents]
        found = torch.zeros(sum(lengths), 32, dtype=torch.float64)
        firsts = np.cumsum([0, *lengths])
        for arrangement in arranged(lengths, "pack", LIMIT, ranks, ranks)[place.index("data")]:
            batch = collate(arrangement, samples)
            hidden = model.hidden(torch.from_numpy(batch.tokens_RT), layout_of(batch))[0]
            places = [np.arange(piece.start, piece.stop) + firsts[piece.place] for piece in batch.pieces]
            places += [np.arange(lengths[one]) + firsts[one] for row in arrangement.rows for one in row]
            own = np.concatenate(places)
            found[own] += hidden[: len(own)]
        place.sum_(found, "data")
        return list(found.split(lengths))

    as_they_are = together(documents)
    for mine, expected in zip(as_they_are, alone, strict=True):
        torch.testing.assert_close(mine, expected)
    for changed in range(len(documents)):
        others = [(tokens + (number == changed)) % 96 for number, tokens in enumerate(documents)]
        for number, (mine, before) in enumerate(zip(together(others), as_they_are, strict=True)):
            assert torch.equal(mine, before) == (number != changed)
    later = [tokens.copy() for tokens in documents]
    later[2][100] += 1
    moved = (together(later)[2] != as_they_are[2]).any(-1)
    assert not moved[:100].any()
    assert moved[100:].all()
    for forgetful in (without_keys, without_positions):
        for number, mine in enumerate(together(documents, forgetful)):
            cut = lengths[number] > LIMIT
            assert ((mine - alone[number]).abs().max() > 1e-3) == cut


def whole(length: int) -> Layout:
    return Layout.of_documents([(length,)])


def layout_of(batch: Batch) -> Layout:
    return Layout.of_documents(batch.documents, pieces=batch.pieces)


def without_keys(batch: Batch) -> Layout:
    return replace(layout_of(batch), pieces=())


def without_positions(batch: Batch) -> Layout:
    return replace(Layout.of_documents(batch.documents), pieces=batch.pieces)


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
    ("ranks", "layout", "how"),
    [
        (3, "context=3 parallel.shard=off", "adapt.method=full"),
        (4, "context=2", "adapt.method=full"),
        (2, "context=2", "adapt.method=lora adapt.base=nf4 adapt.dropout=0.0"),
    ],
)
def test_a_run_with_long_documents_is_that_of_one_process_and_goes_on_at_any_layout(
    ranks: int, layout: str, how: str, said: Path, tmp_path: Path, go: Callable[..., str]
) -> None:
    run, words = tmp_path / "many", f"parallel.{layout} {how}".split()
    go(said, tmp_path / "one", 1, *how.split())
    go(said, run, ranks, *words, "train.steps=4")
    assert json.loads((run / "plan.json").read_text())["micro_tokens"] == LIMIT
    go(said, run, 2, "parallel.context=2", "train.steps=6", "--accept-changes", *how.split())
    go(said, run, 1, "--accept-changes", *how.split())
    expected, found = figures(tmp_path / "one"), figures(run)
    assert len(found["loss"]) == 8
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["norm"] == pytest.approx(expected["norm"], rel=1e-4)
    assert found["eval"][:2] == pytest.approx(expected["eval"][:2], rel=1e-5)
