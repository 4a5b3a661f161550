"""Evaluation of several ranks' training: inline each takes its share, beside one evaluator has the whole."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.evaluate.protocol.ledger import waiting
from glm_accelerate.observe.events import Event, read_events
from tests.checkpoints import latest

Said = dict[str, Any]


@pytest.fixture
def train(go: Callable[..., str]) -> Callable[..., list[Event]]:
    """train(said, run, ranks, *words, **sections): the events of the run."""

    def do(said: Said, run: Path, ranks: int, *more: str, **sections: Said) -> list[Event]:
        keys = said.keys() | sections.keys()
        merged = {key: {**said.get(key, {}), **sections.get(key, {})} for key in keys}
        file = run.with_suffix(".yaml")
        file.write_text(yaml.safe_dump(merged))
        go(file, run, ranks, *more)
        return list(read_events(run / "events.jsonl"))

    return do


def losses(events: list[Event]) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events if event["kind"] == "eval"}


def weights(run: Path) -> dict[str, torch.Tensor]:
    found, _ = latest(run)
    assert found is not None
    return Reader(found).group("weights")


@pytest.fixture
def said(tiny_run: Said) -> Said:
    """Passes of few tokens, so that every rank has some; full float32, in which sums can be compared."""
    return {
        **tiny_run,
        "adapt": {"method": "full"},
        "train": {"steps": 4, "step_samples": 4, "micro_tokens": 64},
        "precision": {"compute": "float32"},
        "parallel": {"shard": "full"},
        "evaluate": {"every": 2, "where": "inline", "metrics": ["loss"]},
        "checkpoint": {"every": 4},
    }


@pytest.mark.parametrize(("ranks", "method"), [(2, "full"), (3, "lora")])
def test_ranks_find_what_one_process_finds(
    ranks: int, method: str, said: Said, tmp_path: Path, train: Callable[..., list[Event]]
) -> None:
    """Divided weights, and rows dealt to the ranks. Before the first step all are equal."""
    adapt = {"method": method, "dropout": 0.0}
    one = losses(train(said, tmp_path / "one", 1, adapt=adapt))
    answers = {"metrics": ["loss", "exact_match"]}
    events = train(said, tmp_path / "many", ranks, adapt=adapt, evaluate=answers)
    assert losses(events)[0] == pytest.approx(one[0], rel=1e-6)
    assert sorted(losses(events)) == [0, 2, 4]
    assert all(event["metrics"].keys() == {"exact_match"} for event in events if event["kind"] == "eval")


@pytest.mark.parametrize("where", ["inline", "beside"])
def test_all_ranks_keep_to_a_budget(
    where: str, said: Said, tmp_path: Path, train: Callable[..., list[Event]]
) -> None:
    """By what the first one measured: else they would wait for each other at different steps."""
    evaluate = {"where": where, "every": 1, "budget": "20%", "samples": "all", "keep": "all"}
    run, more = tmp_path / "run", {"train": {"steps": 24}, "checkpoint": {"every": 6}}
    events = train(said, run, 2, evaluate=evaluate, **more)
    last = [event for event in events if event["kind"] == "decision" and "share" in event][-1]
    assert last["step"] == 24
    assert 0 < last["share"] < 1
    assert {0, 24} <= losses(events).keys()
    found, _ = latest(run)
    assert found is not None
    pace = json.loads((found / "state.json").read_text())["pace"]
    assert {name: pace[name] for name in ("every", "samples")} == {
        name: last[name] for name in ("every", "samples")
    }


def test_an_evaluator_has_the_whole_of_divided_weights(
    said: Said, tmp_path: Path, train: Callable[..., list[Event]]
) -> None:
    inline = losses(train(said, tmp_path / "inline", 2))
    beside = losses(train(said, tmp_path / "beside", 2, evaluate={"where": "beside", "keep": "all"}))
    assert beside == pytest.approx(inline, rel=1e-5)
    mine, theirs = weights(tmp_path / "inline"), weights(tmp_path / "beside")
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    manifest = json.loads(next((tmp_path / "beside" / "snapshots").glob("*/manifest.json")).read_text())
    assert manifest["ranks"] == 2


def test_all_ranks_stop_where_it_was_decided(
    tiny_run: Said, tmp_path: Path, train: Callable[..., list[Event]]
) -> None:
    evaluate = {"every": 2, "where": "beside", "stop_after": 1, "margin": 10.0, "lag": 3, "metrics": ["loss"]}
    events = train({**tiny_run, "checkpoint": {"every": 20}}, tmp_path / "run", 2, evaluate=evaluate)
    assert max(event["step"] for event in events if event["kind"] == "step") == 5
    assert events[-1]["kind"] == "stop"
    assert events[-1]["reason"] == "done"


def test_ranks_give_up_a_branch_together(
    tiny_run: Said, tmp_path: Path, train: Callable[..., list[Event]]
) -> None:
    """They go on from step 1, and ask at 2 before they save."""
    run = tmp_path / "run"
    said = {
        **tiny_run,
        "train": {"steps": 4, "step_samples": 4},
        "evaluate": {"every": 2, "where": "external", "metrics": ["loss"], "keep": "all", "patience": 0},
        "checkpoint": {"every": 1, "keep_last": 9, "wait": True},
    }
    train(said, run, 2)
    before = weights(run)
    train(said, run, 2, "--resume", "1")
    assert [(request.step, request.attempt) for request in waiting(run)] == [(0, 1), (2, 2), (4, 2)]
    assert len(list(run.glob("abandoned/checkpoint-*"))) == 3
    assert len(list(run.glob("abandoned/snapshot-*"))) == 2
    after = weights(run)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_ranks_that_each_have_the_whole_share_the_answers(
    said: Said, tmp_path: Path, train: Callable[..., list[Event]]
) -> None:
    """Seen by a metric, which is scored in children of the rank that answered."""
    metric = tmp_path / "own.py"
    metric.write_text(
        "import os\nfrom pathlib import Path\n\n"
        "def seen(reference, answer):\n"
        "    with (Path(__file__).parent / f'by-{os.getppid()}').open('a') as file:\n"
        "        file.write('x')\n"
        "    return float(len(answer))\n"
    )
    metrics = ["loss", "exact_match", f"{metric}:seen"]
    sections = {
        "adapt": {"method": "lora", "dropout": 0.0},
        "parallel": {"shard": "off"},
        "evaluate": {"every": 4, "where": "inline", "metrics": metrics, "max_new_tokens": 8},
    }
    train(said, tmp_path / "one", 1, **sections)
    (alone,) = tmp_path.glob("by-*")
    asked = len(alone.read_text())
    alone.unlink()
    events = train(said, tmp_path / "many", 3, **sections)
    shares = [len(file.read_text()) for file in tmp_path.glob("by-*")]
    assert len(shares) == 3
    assert sum(shares) == asked
    assert all("reason" not in event for event in events if event["kind"] == "eval")
    (one,), (many,) = ((tmp_path / run / "evals").glob("0-*.predictions.jsonl") for run in ("one", "many"))
    assert many.read_text() == one.read_text()
