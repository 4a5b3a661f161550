"""Shared and factored matrices on several ranks: what goes together learns what one rank learns."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from glm_accelerate.config.load import override
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.observe.events import read_events
from glm_accelerate.train.run import train

Said = dict[str, Any]


def go(said: Said, run: Path, *more: str) -> subprocess.CompletedProcess[str]:
    config = run.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(said))
    line = [sys.executable, "-m", "glm_accelerate.cli.main", "train", str(config), "--run", str(run)]
    words = [*line, "--nproc", "2", *more]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)


def figures(run: Path) -> list[tuple[float, float]]:
    steps = [event for event in read_events(run / "events.jsonl") if event["kind"] == "step"]
    return [(float(str(event["loss"])), float(str(event["grad_norm"]))) for event in steps]


@pytest.fixture
def said(tiny_run: Said) -> Said:
    return {
        **tiny_run,
        "adapt": {"method": "full", "keep_energy": 0.6},
        "train": {"steps": 4, "step_samples": 4},
        "optim": {"learning_rate": 1e-3},
        "precision": {"compute": "float32"},
        "evaluate": {"every": 4},
        "checkpoint": {"every": 4, "wait": True},
    }


@pytest.mark.parametrize("more", [("parallel.shard=full",), ("adapt.share_qk=2",)])
def test_two_ranks_learn_what_one_learns(more: tuple[str, ...], said: Said, tmp_path: Path) -> None:
    """Factors are divided; what is shared stays whole on each, which is what `auto` then means."""
    train(override(RunConfig.model_validate(said), more), tmp_path / "one")
    made = go(said, tmp_path / "two", *more)
    assert made.returncode == 0, made.stderr
    one, two = figures(tmp_path / "one"), figures(tmp_path / "two")
    assert len(one) == len(two) == 4
    for mine, other in zip(one, two, strict=True):
        assert other == pytest.approx(mine, rel=1e-5)


def test_what_is_shared_is_not_divided(said: Said, tmp_path: Path) -> None:
    made = go(said, tmp_path / "run", "adapt.share_qk=2", "parallel.shard=full")
    assert made.returncode == 2
    assert "share projections are not divided" in made.stderr
