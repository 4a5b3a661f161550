"""Shared and factored matrices on several ranks, divided and whole, learn what they learn on one."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from glm_accelerate.config.load import override
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.export.compress import compress
from glm_accelerate.export.export import export
from glm_accelerate.observe.events import read_events
from glm_accelerate.training.run import train

Said = dict[str, Any]
WAYS = [
    ("adapt.method=full", "parallel.shard=full"),
    ("adapt.method=full", "parallel.shard=full", "memory.recompute=blocks"),
    ("adapt.method=full", "parallel.shard=off"),
    ("adapt.method=lora", "adapt.rank=4", "adapt.dropout=0.0", "parallel.shard=full"),
    ("adapt.method=lora", "adapt.base=int8", "adapt.dropout=0.0", "parallel.shard=full"),
]


def figures(run: Path) -> list[tuple[float, float]]:
    steps = [event for event in read_events(run / "events.jsonl") if event["kind"] == "step"]
    return [(float(str(event["loss"])), float(str(event["grad_norm"]))) for event in steps]


@pytest.fixture
def said(tiny_run: Said, tmp_path: Path) -> Said:
    smaller = partial(compress, share_qk=2, keep_energy=0.6)
    out = tmp_path / "smaller"
    export(Path(tiny_run["model"]["path"]), out, merge_adapter=True, layout="structured", change=smaller)
    return {
        **tiny_run,
        "model": {"path": str(out)},
        "train": {"steps": 4, "step_samples": 4},
        "optim": {"learning_rate": 1e-3},
        "precision": {"compute": "float32"},
        "evaluate": {"every": 4},
        "checkpoint": {"every": 4, "wait": True},
    }


@pytest.mark.parametrize("more", WAYS, ids=["divided", "recomputed", "whole", "lora", "qlora"])
def test_two_ranks_learn_what_one_learns(
    more: tuple[str, ...], said: Said, tmp_path: Path, go: Callable[..., str]
) -> None:
    train(override(RunConfig.model_validate(said), more), tmp_path / "one")
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(said))
    go(tmp_path / "two.yaml", tmp_path / "two", 2, *more)
    one, two = figures(tmp_path / "one"), figures(tmp_path / "two")
    assert len(one) == len(two) == 4
    for mine, other in zip(one, two, strict=True):
        assert other == pytest.approx(mine, rel=1e-5)
