"""`evaluate.budget` in real runs: the share is held, and a resumed run repeats its evaluations."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.evaluate.protocol import ledger
from glm_accelerate.observe.events import Event, read_events
from glm_accelerate.training.run import FRESH, train
from glm_accelerate.training.settle import Start

Said = dict[str, Any]


def go(said: Said, run: Path, start: Start = FRESH) -> list[Event]:
    train(RunConfig.model_validate(said), run, start=start)
    return list(read_events(run / "events.jsonl"))


@pytest.fixture
def dear(tiny_run: Said) -> Said:
    """Evaluations that cost as much as several steps."""
    train_file, dev = Path(tiny_run["data"]["train"]), Path(tiny_run["data"]["dev"])
    dev.write_text(train_file.read_text(encoding="utf-8") * 14, encoding="utf-8")
    evaluate = {"where": "inline", "every": 2, "budget": "10%", "metrics": ["loss"]}
    return {
        **tiny_run,
        "train": {"steps": 60, "step_samples": 4},
        "evaluate": {**evaluate, "samples": "all"},
        "checkpoint": {"every": 15, "keep_last": 50},
    }


def evaluated(events: list[Event], attempt: int) -> dict[int, int]:
    """The samples of each step that was evaluated."""
    return {
        one["step"]: one["samples"] for one in events if one["kind"] == "eval" and one["attempt"] == attempt
    }


def test_a_resumed_run_repeats_what_was_decided(dear: Said, tmp_path: Path) -> None:
    """Between two checkpoints the pace is that of the first one, however long anything takes."""
    run = tmp_path / "run"
    before = go(dear, run)
    decided = [one for one in before if one["kind"] == "decision" and "share" in one]
    assert decided[-1]["step"] == 60
    assert decided[-1]["said"].startswith("evaluation took ")
    saved = sorted({one["step"] for one in before if one["kind"] == "checkpoint"})
    first = evaluated(before, 1)
    assert {0, 60} <= first.keys()
    for begun, ended in pairwise(saved):
        state = json.loads((run / "checkpoints" / f"checkpoint-{begun}" / "state.json").read_text())
        last = max(step for step in first if step <= begun)
        every, samples = state["pace"]["every"], state["pace"]["samples"]
        expected = {step for step in range(last + every, ended + 1, every) if step > begun} | {60} & {ended}
        assert {step for step in first if begun < step <= ended} == expected
        assert all(first[step] == samples for step in expected)
    again = go(dear, run, Start(resume=str(saved[0])))
    second = evaluated(again, max(one["attempt"] for one in again))
    later = [one["step"] for one in again if one["kind"] == "checkpoint" and one["attempt"] > 1]
    until = min(saved[1], later[0])
    assert {step: count for step, count in second.items() if step <= until} == {
        step: count for step, count in first.items() if saved[0] < step <= until
    }


def test_losses_of_different_numbers_of_samples_are_on_one_scale(dear: Said, tmp_path: Path) -> None:
    """Each is that of the step compared with, and the difference on the samples that both have."""
    run = tmp_path / "run"
    events = go(dear, run)
    scored = {0: next(one["loss"] for one in events if one["kind"] == "eval")}
    results = {one.step: one for one in ledger.listing(run).results}
    for step in sorted(results)[1:]:
        against = results[step].against
        assert against is not None
        scored[step] = scored[against.step] + against.difference
    state = json.loads((run / "checkpoints" / "checkpoint-60" / "state.json").read_text())
    assert {int(step): one["loss"] for step, one in state["judging"]["judged"].items()} == pytest.approx(
        scored
    )


def test_without_a_budget_nothing_is_decided(dear: Said, tmp_path: Path) -> None:
    dear["evaluate"] |= {"budget": None, "every": 20}
    events = go(dear, tmp_path / "run")
    assert evaluated(events, 1) == dict.fromkeys((0, 20, 40, 60), 308)
    assert not [one for one in events if one["kind"] == "decision" and "share" in one]


@pytest.mark.prove
@pytest.mark.parametrize("percent", [3, 10])
def test_the_share_is_held_within_a_point(dear: Said, tmp_path: Path, percent: int) -> None:
    """A run in which evaluations every 8 steps would take a quarter of the time."""
    dear |= {"train": {"steps": 600, "step_samples": 4}, "checkpoint": {"every": "auto"}}
    dear["evaluate"] |= {"budget": f"{percent}%", "every": 8}
    events = go(dear, tmp_path / "run")
    results = [one for one in events if one["kind"] == "eval"]
    seconds = sum(one["seconds"] for one in results)
    wall = results[-1]["time"] - (results[0]["time"] - results[0]["seconds"])
    assert 100 * seconds / wall == pytest.approx(percent, abs=1.0)
