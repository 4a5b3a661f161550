"""float16 on several real processes: all skip the same steps, choose the same layers, learn what one does."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from glm_accelerate.checkpoint.audit import compare
from glm_accelerate.observe.events import read_events

Said = dict[str, Any]
STEPS = 12


@pytest.fixture
def config(tiny_run: Said, tmp_path: Path) -> Path:
    """A first loss scale at which some steps overflow, and a layer with numbers beyond float16."""
    file = Path(tiny_run["model"]["path"]) / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.gate_up_proj.weight"] *= 1000
    save_file(weights, file, metadata={"format": "pt"})
    said = {
        **tiny_run,
        "adapt": {"method": "full"},
        "train": {"steps": STEPS, "step_samples": 4},
        "optim": {"learning_rate": 1e-3, "epsilon": 1e-3},
        "precision": {"compute": "float16", "loss_scale": 2.0**24},
        "evaluate": {"every": 100},
        "checkpoint": {"every": 4, "wait": True},
    }
    path = tmp_path / "half.yaml"
    path.write_text(yaml.safe_dump(said))
    return path


def events_of(run: Path) -> list[Said]:
    return read_events(run / "events.jsonl")


def kinds(events: list[Said], kind: str) -> list[Said]:
    return [event for event in events if event["kind"] == kind]


def choices(events: list[Said]) -> list[Said]:
    """Of layers, among other decisions."""
    return [event for event in kinds(events, "decision") if "wide" in event]


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(2, "shard=off"), (3, "shard=full"), (2, "pipeline=2"), (2, "context=2 train.micro_tokens=64")],
)
def test_ranks_skip_and_choose_together(
    ranks: int, layout: str, config: Path, tmp_path: Path, go: Callable[..., str]
) -> None:
    go(config, tmp_path / "one", 1)
    go(config, tmp_path / "many", ranks, *f"parallel.{layout}".split())
    one, many = events_of(tmp_path / "one"), events_of(tmp_path / "many")
    for events in (one, many):
        (told,) = choices(events)
        assert told["wide"] == {"layers.1": "float32"}
        applied = [step["applied"] for step in kinds(events, "step")]
        assert applied[0] is False
        assert sum(applied) >= STEPS // 2
    theirs = [choices(events)[0]["extremes"]["layers.1"]["value"] for events in (one, many)]
    assert theirs[1] == pytest.approx(theirs[0], rel=1e-4)  # the largest of all ranks' samples
    skipped = [sum(not step["applied"] for step in kinds(events, "step")) for events in (one, many)]
    assert abs(skipped[0] - skipped[1]) <= 1  # rows are others, and so is what comes close to the edge
    losses = [[step["loss"] for step in kinds(events, "step")] for events in (one, many)]
    assert losses[1][0] == pytest.approx(losses[0][0], rel=1e-4)
    assert losses[1][-1] == pytest.approx(losses[0][-1], rel=2e-2)


def test_a_resume_goes_on_bit_for_bit(config: Path, tmp_path: Path, go: Callable[..., str]) -> None:
    whole, again = tmp_path / "whole", tmp_path / "again"
    go(config, whole, 2, "parallel.shard=full")
    shutil.copytree(whole, again, symlinks=True)
    go(config, again, 2, "parallel.shard=full", "--resume", "4")
    events = events_of(again)
    assert [event["step"] for event in kinds(events, "resume")] == [4]
    assert len(choices(events)) == 1  # the layers came out of the checkpoint
    last = f"checkpoints/checkpoint-{STEPS}"
    assert list(compare(whole / last, again / last)) == []
