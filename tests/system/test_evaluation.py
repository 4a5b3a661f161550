"""Evaluation beside real training: the same weights whatever becomes of the evaluator, and its decisions."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from glm_accelerate.checkpoint.find import best_of
from glm_accelerate.checkpoint.load import open_model
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.evaluate import ledger
from glm_accelerate.observe.events import Event, read_events
from glm_accelerate.train.run import Result, train

Said = dict[str, Any]

EVERY = {"every": 4, "samples": "all", "metrics": ["loss"], "patience": 50.0}


def go(
    said: Said, run: Path, *, stop_after: int | None = None, observers: Any = (), **sections: Said
) -> Result:
    merged = {key: {**said.get(key, {}), **sections.get(key, {})} for key in said.keys() | sections.keys()}
    return train(RunConfig.model_validate(merged), run, stop_after=stop_after, observers=observers)


def moved(run: Path, step: int = 14) -> dict[str, torch.Tensor]:
    reader = Reader(run / "checkpoints" / f"checkpoint-{step}")
    return {**reader.group("weights"), **reader.group("optimizer")}


def same(one: Path, other: Path) -> bool:
    mine, theirs = moved(one), moved(other)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def told(run: Path, kind: str) -> list[Event]:
    return [event for event in read_events(run / "events.jsonl") if event["kind"] == kind]


def losses(run: Path) -> dict[int, float | None]:
    return {event["step"]: event["loss"] for event in told(run, "eval")}


def evaluator(run: Path) -> int | None:
    """The process number of the run's evaluator."""
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if b"glm_accelerate.evaluate.process" in words and str(run).encode() in words:
            return int(entry.name)
    return None


class Slowly:
    """Steps that take longer than an evaluator needs to start, so that it is at work meanwhile."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def observe(self, event: Event) -> None:
        if event["kind"] == "step":
            time.sleep(self.seconds)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("method", ["lora", "full"])
def test_beside_and_inline_find_the_same_and_train_the_same(
    method: str, tiny_run: Said, tmp_path: Path
) -> None:
    adapt = {"method": method}
    go(tiny_run, tmp_path / "off", adapt=adapt, data={"dev": None})
    go(tiny_run, tmp_path / "inline", adapt=adapt, evaluate={**EVERY, "where": "inline"})
    keep = {**EVERY, "where": "beside", "keep": "all"}
    go(tiny_run, tmp_path / "beside", adapt=adapt, evaluate=keep)
    assert same(tmp_path / "off", tmp_path / "inline")
    assert same(tmp_path / "off", tmp_path / "beside")
    inline, beside = losses(tmp_path / "inline"), losses(tmp_path / "beside")
    assert sorted(beside) == [0, 4, 8, 12, 14]
    assert inline == pytest.approx(beside, rel=1e-6)
    assert {event["step"] for event in told(tmp_path / "beside", "snapshot")} == {0, 4, 8, 12, 14}
    assert not told(tmp_path / "inline", "snapshot")
    assert evaluator(tmp_path / "beside") is None


def test_the_best_weights_are_kept_and_opened(tiny_run: Said, tmp_path: Path) -> None:
    run = tmp_path / "run"
    go(tiny_run, run, evaluate={**EVERY, "where": "beside", "keep": "all", "margin": 0.0})
    found = losses(run)
    winner = min(found, key=lambda step: (found[step], step))
    assert best_of(run) == run / "snapshots" / f"snapshot-{winner}"
    assert open_model(run).step == winner
    kept = sorted(int(path.name.partition("-")[2]) for path in (run / "snapshots").iterdir())
    assert len(kept) == 3  # finalists
    assert winner in kept


def disturb(run: Path, number: int, over: threading.Event) -> list[int]:
    """Sends a signal to each evaluator of the run, a moment after it appeared. Returns whom it met."""
    met: list[int] = []
    while not over.wait(0.05):
        child = evaluator(run)
        if child is not None and child not in met:
            time.sleep(0.3)
            os.kill(child, number)
            met.append(child)
    return met


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_evaluator_that_dies_or_hangs_changes_nothing(
    number: signal.Signals, tiny_run: Said, tmp_path: Path
) -> None:
    go(tiny_run, tmp_path / "off", data={"dev": None})
    run, over, met = tmp_path / "run", threading.Event(), list[int]()
    watcher = threading.Thread(target=lambda: met.extend(disturb(run, number, over)))
    watcher.start()
    try:
        hard = {**EVERY, "where": "beside", "patience": 3.0}
        go(tiny_run, run, observers=[Slowly(0.2)], evaluate=hard)
    finally:
        over.set()
        watcher.join()
    assert met
    assert same(tmp_path / "off", run)
    assert not any(event["status"] == "done" for event in told(run, "eval"))
    said = [event["said"] for event in told(run, "warning")]
    assert any("not evaluated at the end" in word or "evaluator ended" in word for word in said)
    assert all(child != evaluator(run) for child in met)


def test_what_was_not_evaluated_is_evaluated_by_hand_afterwards(tiny_run: Said, tmp_path: Path) -> None:
    run = tmp_path / "run"
    go(tiny_run, run, evaluate={**EVERY, "where": "external", "keep": "all"})
    assert [request.step for request in ledger.waiting(run)] == [0, 4, 8, 12, 14]
    assert "--follow" in told(run, "warning")[-1]["said"]
    words = [sys.executable, "-m", "glm_accelerate.evaluate.process", str(run)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert [result.step for result in ledger.results(run)] == [0, 4, 8, 12, 14]
    assert all(result.status == "done" for result in ledger.results(run))
    go(tiny_run, run, evaluate={**EVERY, "where": "external", "keep": "all"})  # done: it hears what came late
    assert sorted(losses(run)) == [0, 4, 8, 12, 14]
    assert best_of(run) is not None


STOPPING = {**EVERY, "every": 2, "stop_after": 1, "margin": 10.0, "lag": 4}  # nothing is ever a gain


@pytest.mark.parametrize("where", ["inline", "beside"])
def test_a_decision_falls_at_its_step_wherever_it_is_made(where: str, tiny_run: Said, tmp_path: Path) -> None:
    """The evaluation of step 2 is no gain over that of step 0; it counts from step 6 on."""
    run = tmp_path / "run"
    result = go(tiny_run, run, evaluate={**STOPPING, "where": where})
    assert (result.step, result.done) == (6, True)
    (decision,) = [event for event in told(run, "decision") if "stop" in event["said"]]
    assert "no gain in 1 evaluations up to step 2; overshoot 4 steps" in decision["said"]
    again = go(tiny_run, run, evaluate={**STOPPING, "where": where})
    assert (again.step, again.done) == (6, True)


def compared(run: Path) -> dict[int, tuple[int, str]]:
    """With which step each was compared, and what came of it."""
    found = {result.step: result.against for result in ledger.results(run)}
    return {step: (one.step, one.verdict) for step, one in found.items() if one is not None}


def test_what_a_step_is_compared_with_does_not_depend_on_when_results_come(
    tiny_run: Said, tmp_path: Path
) -> None:
    """Steps of milliseconds: an evaluator beside is always late, inline is at once, a resume asks again."""
    evaluate = {**EVERY, "every": 2, "lower_rate_after": 1, "margin": 0.0, "lag": 4}
    for where in ("inline", "beside"):
        go(tiny_run, tmp_path / where, evaluate={**evaluate, "where": where})
    for stop_after in (5, 8):
        go(tiny_run, tmp_path / "again", evaluate={**evaluate, "where": "beside"}, stop_after=stop_after)
    go(tiny_run, tmp_path / "again", evaluate={**evaluate, "where": "beside"})
    inline = compared(tmp_path / "inline")
    assert sorted(inline) == [4, 6, 8, 10, 12, 14]  # nothing counts before step 4 but the beginning
    assert inline[4][0] == 0
    assert all(against <= step - 4 for step, (against, _) in inline.items())
    assert compared(tmp_path / "beside") == compared(tmp_path / "again") == inline
    assert same(tmp_path / "inline", tmp_path / "beside")
    assert same(tmp_path / "inline", tmp_path / "again")


def test_without_an_evaluated_step_nothing_is_called_the_best(tiny_run: Said, tmp_path: Path) -> None:
    """Only the beginning could be evaluated; and a run without evaluation forgets an earlier best."""
    run = tmp_path / "run"
    evaluate = {**EVERY, "where": "inline", "every": 14}
    go(tiny_run, run, evaluate=evaluate, stop_after=3)
    assert sorted(losses(run)) == [0]
    assert best_of(run) is None
    assert open_model(run).step == 3
    go(tiny_run, run, evaluate=evaluate)
    assert best_of(run) is not None
    (run / "best").write_text("snapshots/snapshot-0\n")
    go(tiny_run, run, evaluate=evaluate)
    assert (run / "best").read_text() == "checkpoints/checkpoint-14\n"


def test_a_signal_ends_the_wait_for_late_evaluations(tiny_run: Said, tmp_path: Path) -> None:
    """Nobody follows, the decision waits for ten minutes at least: SIGTERM is heard at once, all is saved."""
    run = tmp_path / "run"
    said = {
        **tiny_run,
        "evaluate": {**EVERY, "every": 2, "where": "external", "stop_after": 1, "lag": 2},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(said))
    words = [sys.executable, "-m", "glm_accelerate.cli.main", "train", str(tmp_path / "c.yaml")]
    with subprocess.Popen(
        [*words, "--run", str(run)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        ends = time.monotonic() + 40
        while not (run / "events.jsonl").is_file() or len(told(run, "step")) < 2:
            assert time.monotonic() < ends
            time.sleep(0.1)
        time.sleep(1.0)
        assert len(told(run, "step")) == 2  # it waits
        process.terminate()
        assert process.wait(20) == 75
    assert told(run, "stop")[-1]["reason"] == "SIGTERM"
    assert open_model(run).step == 2


def test_a_full_disk_costs_evaluations_and_no_training(tiny_run: Said, tmp_path: Path) -> None:
    """Requests and results cannot be written: where their folder would be, a link leads nowhere."""
    go(tiny_run, tmp_path / "off", data={"dev": None})
    run = tmp_path / "run"
    run.mkdir()
    (run / "evals").symlink_to(tmp_path / "nowhere" / "at all")
    go(tiny_run, run, evaluate={**EVERY, "where": "inline"})
    assert same(tmp_path / "off", run)
    assert all("not written" in event["reason"] for event in told(run, "eval"))


def rates(run: Path) -> dict[int, float]:
    return {event["step"]: event["learning_rate"] for event in told(run, "step")}


@pytest.mark.parametrize("where", ["inline", "beside"])
def test_lowered_rates_are_the_same_after_a_resume(where: str, tiny_run: Said, tmp_path: Path) -> None:
    evaluate = {
        **EVERY, "every": 2, "lower_rate_after": 2, "margin": 10.0, "lag": 3, "where": where,
    }  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    constant = {"schedule": "constant", "warmup": 0.0}
    go(tiny_run, whole, evaluate=evaluate, optim=constant)
    for stop_after in (6, 9):
        go(tiny_run, parts, evaluate=evaluate, optim=constant, stop_after=stop_after)
        if where == "inline":
            shutil.rmtree(parts / "evals")  # the checkpoint knows what was answered
    go(tiny_run, parts, evaluate=evaluate, optim=constant)
    first = rates(whole)[1]
    # No gain at 2 and 4: lowered at 7. None at 6 and 8: at 11.
    expected = {step: first * 0.5 ** ((step > 7) + (step > 11)) for step in range(1, 15)}
    assert rates(whole) == pytest.approx(expected)
    assert rates(parts) == rates(whole)
    assert same(whole, parts)


def test_a_branch_that_is_given_up_leaves_no_results(tiny_run: Said, tmp_path: Path) -> None:
    run = tmp_path / "run"
    evaluate = {**EVERY, "where": "inline"}
    saving = {"every": 2, "keep_last": 20, "wait": True}
    go(tiny_run, run, evaluate=evaluate, checkpoint=saving, stop_after=9)
    before = losses(run)
    for step in (6, 8):
        path = run / "checkpoints" / f"checkpoint-{step}" / "manifest.json"
        path.write_bytes(path.read_bytes()[:-5])
    path = run / "checkpoints" / "checkpoint-9" / "manifest.json"
    path.write_bytes(path.read_bytes()[:-5])
    go(tiny_run, run, evaluate=evaluate, checkpoint=saving)
    assert {(result.step, result.attempt) for result in ledger.results(run)} == {
        (0, 1), (4, 1), (8, 2), (12, 2), (14, 2),
    }  # fmt: skip
    assert (run / "abandoned").is_dir()
    assert losses(run)[8] == before[8]  # the same steps again


def test_the_plan_says_where_and_why(tiny_run: Said, tmp_path: Path) -> None:
    go(tiny_run, tmp_path / "run", stop_after=1)
    said = {one["name"]: one for one in json.loads((tmp_path / "run" / "plan.json").read_text())["reasons"]}
    assert said["where"]["value"] == "inline"
    assert said["where"]["why"]
