"""Evaluation beside real training: the same weights whatever becomes of the evaluator, and its decisions."""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from glm_accelerate.assemble.model import open_model
from glm_accelerate.checkpoint.find import best_of
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.evaluate.protocol import ledger
from glm_accelerate.evaluate.protocol.messages import EvaluationResult, Findings
from glm_accelerate.observe.events import Event, read_events
from glm_accelerate.training.run import FRESH, Result, train
from glm_accelerate.training.settle import Start
from tests.processes import children_of
from tests.warm import Warm

Said = dict[str, Any]

EVERY = {"every": 4, "samples": "all", "metrics": ["loss"], "patience": 50.0}


def go(
    said: Said,
    run: Path,
    *,
    stop_after: int | None = None,
    observers: Any = (),
    start: Start = FRESH,
    **sections: Said,
) -> Result:
    merged = {key: {**said.get(key, {}), **sections.get(key, {})} for key in said.keys() | sections.keys()}
    config = RunConfig.model_validate(merged)
    return train(config, run, start=start, stop_after=stop_after, observers=observers)


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
        if b"glm_accelerate.evaluate.measuring.serve" in words and str(run).encode() in words:
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


class At:
    """Does something when a step is done, before anything follows from it."""

    def __init__(self, step: int, do: Callable[[], object]) -> None:
        self.step, self.do = step, do

    def observe(self, event: Event) -> None:
        if event["kind"] == "step" and event["step"] == self.step:
            self.do()

    def close(self) -> None:
        pass


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.prove)])
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


def test_the_best_checkpoint_stays_though_later_figures_are_lower(tiny_run: Said, tmp_path: Path) -> None:
    """Inline there are no snapshots: later steps are as good as equal, and take neither its place nor it."""
    run, named = tmp_path / "run", dict[int, Path | None]()

    def look(step: int) -> Callable[[], None]:
        return lambda: named.update({step: best_of(run)})

    go(
        tiny_run,
        run,
        evaluate={**EVERY, "every": 1, "where": "inline", "margin": 0.15},
        optim={"learning_rate": 0.05, "schedule": "linear", "warmup": 0.0},
        checkpoint={"every": 1, "wait": True, "keep_last": 1, "keep_best": 1},
        observers=[At(step, look(step)) for step in range(1, 15)],
    )
    (best,) = (
        event["step"]
        for event in told(run, "eval")
        if (event.get("against") or {}).get("verdict") == "better"
    )
    found = losses(run)
    assert found[14] < found[best]
    assert best_of(run) == run / "checkpoints" / f"checkpoint-{best}"
    assert {named[step] for step in range(best + 2, 15)} == {best_of(run)}
    kept = {path.name for path in (run / "checkpoints").glob("checkpoint-*")}
    assert kept == {f"checkpoint-{best}", "checkpoint-14"}


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
    number: signal.Signals, tiny_run: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glm_accelerate.evaluate.protocol.child.FIRST_RESTART", 0.1)
    monkeypatch.setattr("glm_accelerate.evaluate.protocol.child.TERMINATING", 0.5)
    go(tiny_run, tmp_path / "off", data={"dev": None})
    run, over, met = tmp_path / "run", threading.Event(), list[int]()
    watcher = threading.Thread(target=lambda: met.extend(disturb(run, number, over)))
    watcher.start()
    try:
        hard = {**EVERY, "where": "beside", "patience": 1.5}
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


def test_what_was_not_evaluated_is_evaluated_by_hand_afterwards(
    tiny_run: Said, tmp_path: Path, warm: Callable[..., Warm]
) -> None:
    run = tmp_path / "run"
    go(tiny_run, run, evaluate={**EVERY, "where": "external", "keep": "all"})
    assert [request.step for request in ledger.waiting(run)] == [0, 4, 8, 12, 14]
    assert "--follow" in told(run, "warning")[-1]["said"]
    done = warm("evaluate", str(run), "--follow").done()
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


def signal_writers(number: int) -> None:
    """To the processes that write checkpoints and snapshots for this one."""
    for child in children_of(os.getpid()):
        if b"checkpoint.writer" in Path(f"/proc/{child}/cmdline").read_bytes():
            os.kill(child, number)


def test_the_last_evaluation_is_not_left_out(tiny_run: Said, tmp_path: Path) -> None:
    """The snapshot of step 12 is still being written at 13, which is left out, and at 14, which waits."""
    halt = At(12, lambda: signal_writers(signal.SIGSTOP))
    resume = At(14, lambda: threading.Timer(0.5, signal_writers, [signal.SIGCONT]).start())
    said = {"evaluate": {**EVERY, "every": 1, "where": "external"}, "checkpoint": {"wait": True}}
    go(tiny_run, tmp_path / "run", observers=[halt, resume], **said)
    (left_out,) = (event for event in told(tmp_path / "run", "eval") if event["step"] == 13)
    assert left_out["reason"] == "the snapshot before is still being written"
    assert [request.step for request in ledger.waiting(tmp_path / "run")][-1] == 14


def test_a_signal_ends_the_wait_for_late_evaluations(
    tiny_run: Said, tmp_path: Path, warm: Callable[..., Warm]
) -> None:
    """Nobody follows, the decision waits for ten minutes at least: SIGTERM is heard at once, all is saved."""
    run = tmp_path / "run"
    said = {
        **tiny_run,
        "evaluate": {**EVERY, "every": 2, "where": "external", "stop_after": 1, "lag": 2},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(said))
    process = warm("train", str(tmp_path / "c.yaml"), "--run", str(run))
    ends = time.monotonic() + 60
    while not (run / "events.jsonl").is_file() or len(told(run, "step")) < 2:
        assert time.monotonic() < ends
        time.sleep(0.1)
    time.sleep(1.0)
    assert len(told(run, "step")) == 2  # it waits
    process.terminate()
    assert process.wait(120) == 75
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


@pytest.mark.parametrize(
    ("where", "stops"), [("inline", (6, 9)), pytest.param("beside", (9,), marks=pytest.mark.prove)]
)
def test_lowered_rates_are_the_same_after_a_resume(
    where: str, stops: tuple[int, ...], tiny_run: Said, tmp_path: Path
) -> None:
    evaluate = {
        **EVERY, "every": 2, "lower_rate_after": 2, "margin": 10.0, "lag": 3, "where": where,
    }  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    constant = {"schedule": "constant", "warmup": 0.0}
    go(tiny_run, whole, evaluate=evaluate, optim=constant)
    for stop_after in stops:
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


def everything(run: Path) -> dict[str, list[str]]:
    """All that evaluations and checkpoints have left, and what the best is called."""
    names = {folder: sorted(os.listdir(run / folder)) for folder in ("evals", "checkpoints", "snapshots")}
    return {**names, "best": [(run / "best").read_text()], "aside": sorted(map(str, run.glob("abandoned/*")))}


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_named_start_that_comes_to_nothing_has_changed_nothing(tiny_run: Said, tmp_path: Path) -> None:
    """Ctrl-C before it has saved or asked anything: the run goes on with all that it had found."""
    run, evaluate = tmp_path / "run", {**EVERY, "where": "beside", "keep": "all", "margin": 0.0}
    saving = {"every": 3, "keep_last": 20, "wait": True}
    go(tiny_run, run, evaluate=evaluate, checkpoint=saving)
    before, course = everything(run), ledger.results(run)
    assert best_of(run) is not None
    there, soon = Start(resume="3"), [At(4, interrupt)]
    with pytest.raises(KeyboardInterrupt):
        go(tiny_run, run, evaluate=evaluate, checkpoint=saving, start=there, observers=soon)
    assert everything(run) == before
    assert go(tiny_run, run, evaluate=evaluate, checkpoint=saving).step == 14
    assert everything(run) == before
    assert ledger.results(run) == course


@pytest.mark.parametrize(
    ("every", "until", "checkpoints", "found"),
    [
        (4, 5, [3], [(0, 1), (4, 2)]),  # it asked at 4, before it saved
        (12, 7, [3, 6], [(0, 1)]),  # it saved at 6, before it asked
    ],
)
def test_of_a_branch_that_is_given_up_nothing_stays(
    every: int,
    until: int,
    checkpoints: list[int],
    found: list[tuple[int, int]],
    tiny_run: Said,
    tmp_path: Path,
) -> None:
    """Checkpoints without their evaluations, or evaluations without their checkpoints, are never left."""
    run, evaluate = tmp_path / "run", {**EVERY, "where": "inline", "every": every}
    saving = {"every": 3, "keep_last": 20, "keep_best": 0, "wait": True}
    go(tiny_run, run, evaluate=evaluate, checkpoint=saving)
    before = losses(run)
    there, later = Start(resume="3"), [At(until, interrupt)]
    with pytest.raises(KeyboardInterrupt):
        go(tiny_run, run, evaluate=evaluate, checkpoint=saving, start=there, observers=later)
    assert [
        step for step in range(15) if (run / "checkpoints" / f"checkpoint-{step}").is_dir()
    ] == checkpoints
    assert [(result.step, result.attempt) for result in ledger.results(run)] == found
    go(tiny_run, run, evaluate=evaluate, checkpoint=saving)
    assert losses(run) == before
    assert {result.step: result.loss for result in ledger.results(run)} == before


def test_what_was_asked_otherwise_decides_nothing(tiny_run: Said, tmp_path: Path) -> None:
    """Harder held-out data from step 6 on: losses higher than all before are no step back."""
    lines = (tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    for name, first in (("easy", 6), ("hard", 0)):  # answers of seven words, and of one
        (tmp_path / f"{name}.jsonl").write_text("".join(lines[first::7]), encoding="utf-8")
    easy, hard = ({"dev": str(tmp_path / f"{name}.jsonl")} for name in ("easy", "hard"))
    run, evaluate = tmp_path / "run", {**EVERY, "every": 2, "where": "inline", "stop_after": 2, "margin": 0.0}
    go(tiny_run, run, evaluate=evaluate, data=easy, stop_after=6)
    accept = Start(accept=frozenset({"config"}))
    assert go(tiny_run, run, evaluate=evaluate, data=hard, start=accept).step == 14
    found: dict[int, list[float]] = {1: [], 2: []}
    for result in ledger.results(run):
        assert result.loss is not None
        found[result.attempt].append(result.loss)
    assert min(found[2]) > min(found[1])
    assert [len(losses) for losses in found.values()] == [4, 5]  # step 6 is asked anew
    said = "evaluations ask otherwise than before (data.dev, evaluate, a file of a metric, or the tokenizer"
    warning = f"{said} is another): step 6 is the first that counts"
    assert [event["said"] for event in told(run, "warning")].count(warning) == 1
    go(tiny_run, run, evaluate=evaluate, data=hard)  # done, and it asks the same
    assert [event["said"] for event in told(run, "warning")].count(warning) == 1


def test_a_rate_that_was_lowered_stays_so_when_something_else_is_asked(
    tiny_run: Said, tmp_path: Path
) -> None:
    evaluate = {**EVERY, "every": 2, "lower_rate_after": 2, "margin": 10.0, "lag": 2, "where": "inline"}
    constant, run = {"schedule": "constant", "warmup": 0.0}, tmp_path / "run"
    go(tiny_run, run, evaluate=evaluate, optim=constant, stop_after=7)
    evaluate = {**evaluate, "metrics": ["loss", "exact_match"]}
    for stop_after in (9, None):
        accept = Start(accept=frozenset({"config"}))
        go(tiny_run, run, evaluate=evaluate, optim=constant, start=accept, stop_after=stop_after)
    first = rates(run)[1]
    # No gain at 2 and 4: lowered at 7. Step 7 is the first again; none at 8 and 10: at 13.
    expected = {step: first * 0.5 ** ((step > 6) + (step > 12)) for step in range(1, 15)}
    assert rates(run) == pytest.approx(expected)


RATE = "the learning rate is"


def lowerings(run: Path) -> list[tuple[int, str]]:
    found = [event for event in told(run, "decision") if event["said"].startswith(RATE)]
    return [(event["step"], event["said"]) for event in found]


def answer_all(run: Path, until: int) -> None:
    """As an evaluator does, for whom all steps are alike."""
    for request in ledger.waiting(run):
        if request.step <= until:
            result = EvaluationResult(
                request.step, request.exam_id, request.attempt, "done", loss=1.0, samples=4, total=4
            )
            ledger.publish(run, Findings(result))


def test_a_decision_that_a_signal_put_off_is_told_once(tiny_run: Said, tmp_path: Path) -> None:
    """Step 4 waits for the evaluation of step 2 when SIGTERM comes. It is there when the run goes on."""
    run, over = tmp_path / "run", threading.Event()
    said = {
        "evaluate": {**EVERY, "every": 2, "where": "external", "lower_rate_after": 1, "lag": 2},
        "optim": {"schedule": "constant", "warmup": 0.0},
    }

    def answer() -> None:
        while not over.wait(0.05):
            answer_all(run, 0)

    evaluator = threading.Thread(target=answer)
    evaluator.start()
    try:
        stopped = go(tiny_run, run, observers=[At(4, lambda: signal.raise_signal(signal.SIGTERM))], **said)
    finally:
        over.set()
        evaluator.join()
    assert (stopped.step, stopped.reason) == (4, "SIGTERM")
    assert lowerings(run) == []
    for step in (5, 6):
        answer_all(run, 4)
        go(tiny_run, run, stop_after=step, **said)
    assert lowerings(run) == [
        (4, f"{RATE} 0.5 of the schedule's from step 5 on: no gain in 1 evaluations up to step 2"),
        (6, f"{RATE} 0.25 of the schedule's from step 7 on: no gain in 1 evaluations up to step 4"),
    ]
    assert rates(run)[5] == rates(run)[4] / 2


def test_the_plan_says_where_and_why(tiny_run: Said, tmp_path: Path) -> None:
    go(tiny_run, tmp_path / "run", stop_after=1)
    said = {one["name"]: one for one in json.loads((tmp_path / "run" / "plan.json").read_text())["reasons"]}
    assert said["where"]["value"] == "inline"
    assert said["where"]["why"]
