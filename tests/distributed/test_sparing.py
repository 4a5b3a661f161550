"""Ranks that share products, and stages, recompute no more than they must, and learn the same."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml

from glm_accelerate.config.load import override
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.pack import pieces_of
from glm_accelerate.kernels.rope import rope_table
from glm_accelerate.memory.measure import measure
from glm_accelerate.memory.recompute import Keep, apply
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.layout import Layout
from glm_accelerate.observe.events import read_events
from glm_accelerate.parallel.place import Axes, Place
from glm_accelerate.parallel.ranks import leave
from glm_accelerate.plan.ground import ground_of
from glm_accelerate.plan.hardware import detect
from glm_accelerate.plan.resolve import resolve
from glm_accelerate.plan.run_plan import RunPlan
from tests.distributed.one_process import CPU, MODELS, divide, joined, model_of

LONG = 64


def planned(config: RunConfig, ranks: int, *words: str) -> RunPlan:
    return resolve(override(config, list(words)), ground_of(config, replace(detect(), device="cpu"), ranks))


def figures(run: Path) -> list[tuple[float, float]]:
    steps = [event for event in read_events(run / "events.jsonl") if event["kind"] == "step"]
    return [(float(str(event["loss"])), float(str(event["grad_norm"]))) for event in steps]


def exchanges(place: Place, options: Callable[[Decoder, Layout], list[Keep]]) -> dict[Keep, list[int]]:
    """By what blocks keep: how many collectives a pass issues forward, and backward."""
    counted: dict[Keep, list[int]] = {}
    pieces = pieces_of(0, 2 * LONG, 2, place.index("context")) if place.axes.context == 2 else ()
    layout = Layout.of_documents([tuple(map(len, pieces)) or (LONG,)], CPU, pieces)
    tokens_BT = torch.arange(LONG).remainder(96)[None]
    sums: list[float] = []
    for keep in (None, (), *options(made(place), layout)):
        model = made(place)
        apply(list(model.layers), (keep,) * len(model.layers))
        with Collectives() as seen:
            out = model.hidden(tokens_BT, layout)
            forward = seen.count
            out.double().square().sum().backward()
        counted[keep] = [forward, seen.count - forward]
        sums.append(float(sum(one.grad.double().sum() for one in model.parameters() if one.grad is not None)))
    assert len(set(sums)) == 1, sums
    return counted


class Collectives:
    """Counts the collectives that are issued while it is entered."""

    NAMES = ("all_gather", "reduce_scatter", "all_reduce")

    def __init__(self) -> None:
        self.count = 0
        self.real = {name: getattr(dist, name) for name in self.NAMES}

    def __enter__(self) -> "Collectives":
        for name, function in self.real.items():
            setattr(dist, name, partial(self._count, function))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self.real.items():
            setattr(dist, name, function)

    def _count(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        self.count += 1
        return function(*args, **named)


def made(place: Place) -> Decoder:
    model = model_of(replace(MODELS["glm4"], layers=2), "full").train()
    divide(model, place)
    return model


def kept_by_option(model: Decoder, layout: Layout) -> list[Keep]:
    """What the chooser may let a block keep, as it is measured for a run."""
    table = rope_table(layout.positions_BT, model.sizes.rope_width, model.sizes.rope_theta)
    x_BTH = torch.randn(
        1, model.tokens_here(LONG), model.sizes.width, dtype=torch.float64, requires_grad=True
    )
    costs = measure(model.layers[0], x_BTH, layout, table, None, None, repeats=1)
    found = [option.keep for option in costs.options if option.keep]
    return [max(found, key=len)]


def one_rank(rank: int, ranks: int, folder: Path) -> None:
    here = joined(rank, ranks, folder)
    layers = 2
    for axes, forward, repeated in ((Axes(tensor=2), 4, 4), (Axes(data=2, context=2), 1, 1)):
        place = Place(here, axes)
        counts = exchanges(place, kept_by_option)
        everything, nothing, chosen = counts.values()
        outside = everything[0] - forward * layers  # of embedding and head
        assert outside >= 0
        assert nothing == [everything[0], everything[1] + repeated * layers], list(counts.values())
        assert chosen == everything, (axes, list(counts.values()), list(counts)[2])
    assert here.store is not None
    leave(here.store, ranks)


@pytest.mark.process
def test_what_a_plan_keeps_is_not_exchanged_again(tmp_path: Path) -> None:
    """Blocks that keep their inputs alone exchange all of it again."""
    mp.start_processes(one_rank, args=(2, tmp_path), nprocs=2, start_method="forkserver")


@pytest.mark.parametrize("layout", ["tensor", "pipeline", "shard", "context"])
def test_between_all_and_nothing(
    layout: str, tiny_run: dict[str, Any], tmp_path: Path, go: Callable[..., str]
) -> None:
    said = {**tiny_run, "adapt": {"method": "full"}, "parallel": {"shard": "off", layout: 2}}
    said["precision"] = {"compile": "off"}
    if layout == "context":
        words = ["red and green and " * 40, "rot gruen " * 40]
        roles = zip(("user", "assistant"), words, strict=True)
        line = json.dumps({"messages": [{"role": role, "content": text} for role, text in roles]}) + "\n"
        with Path(said["data"]["train"]).open("a") as file:
            file.write(2 * line)
        said["data"] = {**said["data"], "max_tokens": 512}
        said["train"] = {**said["train"], "micro_tokens": 128}
    config = RunConfig.model_validate(said)
    plans = [planned(config, 2, f"memory.recompute={how}") for how in ("off", "blocks")]
    most, least = (plan.memory.needed for plan in plans if plan.memory is not None)
    words = [
        f"memory.limit={(least + 4 * most) // 5 / 2**20:.3f}MiB",
        f"train.micro_tokens={plans[0].micro_tokens}",
    ]
    assert 0 < planned(config, 2, *words).spare_bytes < most - least
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(said))
    go(path, tmp_path / "plain", 2, words[1])
    go(path, tmp_path / "sparing", 2, *words)
    events = [str(event.get("said")) for event in read_events(tmp_path / "sparing/events.jsonl")]
    assert [text for text in events if text.startswith("blocks recompute")]
    assert figures(tmp_path / "plain") == figures(tmp_path / "sparing")
