"""Following a run in this process: the order of answers, when it ends, what becomes of what goes wrong."""

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from glm_accelerate.checkpoint.checkpointer import Checkpointer, Save
from glm_accelerate.checkpoint.lease import is_leased
from glm_accelerate.evaluate.protocol import ledger
from glm_accelerate.evaluate.protocol.evaluator import (
    FollowOptions,
    RanksOutOfStep,
    evaluates_all,
    finished,
    follow,
)
from glm_accelerate.evaluate.protocol.messages import EvaluationResult, Findings, Request, full_exam_id
from glm_accelerate.evaluate.statistics.intervals import SampleLosses
from glm_accelerate.parallel.part import part_of
from glm_accelerate.runtime.errors import UserError

EXAM = "0123abcd"
ONCE = FollowOptions(once=True)


@dataclass
class Recorder:
    """Measures nothing much, and remembers what it was asked."""

    exam_id: str = EXAM
    trouble: Callable[[Request], None] = lambda request: None
    halves: int = 0
    seen: list[tuple[int, int | None, bool, bool]] = field(default_factory=list)

    def smaller(self) -> bool:
        self.halves -= 1
        return self.halves >= 0

    def examine(self, request: Request, run: str, against: SampleLosses | None) -> Findings:
        count = None if against is None else len(against.losses_N)
        other = request.against_weights
        self.seen.append(
            (
                request.step,
                count,
                is_leased(Path(run) / request.weights),
                other is not None and is_leased(Path(run) / other),
            )
        )
        self.trouble(request)
        items = SampleLosses(np.full(4, request.step + 0.5), np.ones(4))
        return Findings(EvaluationResult(0, "ffffffff", 7, "done", loss=1.0, samples=4, total=4), items)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (3, 6, 9):
        made = Checkpointer(tmp_path, run_id="f00d", kind="snapshot")
        groups = {"weights": {"w": part_of(torch.ones(4))}}
        made.save(Save(step, 1, groups, {}, {"data": "d"}, {}))
        (outcome,) = made.close(10)
        assert outcome.error is None
    return tmp_path


def ask(
    run: Path, step: int, against: int | None = None, exam_id: str = EXAM, whole: bool = False
) -> Request:
    stem = None if against is None else f"{against}-{EXAM}-1"
    other = None if against is None else f"snapshots/snapshot-{against}"
    request = Request(step, exam_id, 1, f"snapshots/snapshot-{step}", stem, other, whole)
    ledger.post(run, request)
    return request


def status(run: Path) -> dict[int, str]:
    return {said.step: said.status for said in ledger.results(run)}


def test_the_newest_first_unless_all_count(run: Path) -> None:
    heard: list[str] = []
    for step in (3, 6, 9):
        ask(run, step)
    newest = Recorder()
    follow(run, newest, FollowOptions(once=True, on_message=heard.append))
    assert [step for step, *_ in newest.seen] == [9, 6, 3]
    assert heard[:2] == [f"claimed 9-{EXAM}-1", f"done 9-{EXAM}-1"]
    assert all(leased for _, _, leased, _ in newest.seen)
    assert status(run) == {3: "done", 6: "done", 9: "done"}  # under their own names, whatever was said
    for path in (run / "evals").iterdir():
        path.unlink()
    for step in (3, 6, 9):
        ask(run, step)
    oldest = Recorder()
    follow(run, oldest, FollowOptions(once=True, oldest=True))
    assert [step for step, *_ in oldest.seen] == [3, 6, 9]


def test_it_is_compared_with_what_was_measured_before(run: Path) -> None:
    ask(run, 3)
    follow(run, Recorder(), ONCE)
    ask(run, 6, against=3)
    ask(run, 9, against=5)  # which nobody has answered
    recorder = Recorder()
    follow(run, recorder, ONCE)
    assert sorted(recorder.seen) == [(6, 4, True, True), (9, None, True, False)]


def test_another_plan_is_not_answered(run: Path) -> None:
    ask(run, 3, exam_id="00000000")
    ask(run, 6, exam_id=EXAM, whole=True)
    ask(run, 9, exam_id=full_exam_id(EXAM), whole=True)
    recorder = Recorder()
    follow(run, recorder, ONCE)
    assert [step for step, *_ in recorder.seen] == [9]
    assert status(run) == {3: "failed", 6: "failed", 9: "done"}
    reason = ledger.results(run)[0].reason or ""
    assert "00000000" in reason
    assert EXAM in reason
    assert "start the evaluator anew" in reason


def test_one_started_by_hand_refuses_another_exam_and_takes_nothing(run: Path) -> None:
    """It could only use up what others would answer."""
    ask(run, 3)
    ask(run, 6, exam_id="00000000")
    with pytest.raises(UserError, match="the trainer asks exam 00000000"):
        follow(run, Recorder(), replace(ONCE, strict=True))
    assert [request.step for request in ledger.waiting(run)] == [3, 6]
    assert status(run) == {}


def test_who_answered_is_on_record(run: Path) -> None:
    ask(run, 3)
    follow(run, Recorder(), ONCE)
    (result,) = ledger.results(run)
    assert result.by.keys() == {"host", "process", "version"}
    assert torch.__version__ in result.by["version"]


def test_out_of_memory_is_tried_once_with_less(run: Path) -> None:
    def heavy(request: Request) -> None:
        torch.empty(2**60)

    ask(run, 3)
    ask(run, 6)
    recorder = Recorder(trouble=heavy, halves=9)
    follow(run, recorder, ONCE)
    assert len(recorder.seen) == 4
    assert status(run) == {3: "failed", 6: "failed"}
    assert all((said.reason or "").startswith("out of memory") for said in ledger.results(run))
    ask(run, 9)
    unwilling = Recorder(trouble=heavy, halves=0)
    follow(run, unwilling, ONCE)
    assert len(unwilling.seen) == 1


@pytest.mark.parametrize("name", ["snapshots/snapshot-4", "snapshots", "snapshots/snapshot-3"])
def test_weights_that_are_gone_or_broken_fail(run: Path, name: str) -> None:
    if name.endswith("3"):
        (run / name / "manifest.json").unlink()
    ledger.post(run, Request(4, EXAM, 1, name))
    follow(run, Recorder(), ONCE)
    assert status(run) == {4: "failed"}
    assert name in (ledger.results(run)[0].reason or "")


def test_an_interrupt_frees_what_was_claimed(run: Path) -> None:
    def stop(request: Request) -> None:
        raise KeyboardInterrupt

    request = ask(run, 3)
    with pytest.raises(KeyboardInterrupt):
        follow(run, Recorder(trouble=stop), ONCE)
    assert not ledger.is_claimed(run, request)
    assert ledger.waiting(run) == [request]
    assert not is_leased(run / request.weights)


def test_a_device_in_error_ends_the_process(run: Path) -> None:
    def broken(request: Request) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    ask(run, 3)
    with pytest.raises(RanksOutOfStep, match="CUDA error"):
        follow(run, Recorder(trouble=broken), FollowOptions())
    assert status(run) == {3: "failed"}


@pytest.mark.parametrize(
    ("last", "over"),
    [
        ({"kind": "stop", "reason": "done"}, True),
        ({"kind": "stop", "reason": "no gain in 3 evaluations since step 6"}, True),
        ({"kind": "stop", "reason": "SIGTERM"}, False),
        ({"kind": "stop", "reason": "asked to stop after step 3"}, False),
        ({"kind": "stop", "reason": "a signal to another rank"}, False),
        ({"kind": "step", "step": 3}, False),
        ([], False),
    ],
)
def test_when_a_run_is_finished(run: Path, last: object, over: bool) -> None:
    assert not finished(run)
    (run / "events.jsonl").write_text(f'{{"kind": "start"}}\n{json.dumps(last)}\n')
    assert finished(run) is over
    (run / "events.jsonl").write_text('{"kind": "stop", "reason": "do')
    assert not finished(run)


def test_it_ends_with_the_run_when_nothing_waits(run: Path) -> None:
    (run / "events.jsonl").write_text('{"kind": "stop", "reason": "done"}\n')
    ask(run, 3)
    follow(run, Recorder(), FollowOptions(poll=0.01))
    assert status(run) == {3: "done"}


def test_waiting_for_what_another_has_costs_no_descriptors(run: Path) -> None:
    """Looks at a request that somebody else is at, as many as an evaluation of minutes brings."""
    request = ask(run, 3)
    follower = threading.Thread(target=follow, args=(run, Recorder(), FollowOptions(poll=0.001)))
    before = len(os.listdir("/dev/fd"))
    with ledger.claim(run, request) as ours:
        assert ours
        follower.start()
        time.sleep(1)
        assert len(os.listdir("/dev/fd")) < before + 10
    (run / "events.jsonl").write_text('{"kind": "stop", "reason": "done"}\n')
    follower.join(60)
    assert status(run) == {3: "done"}
    assert not ledger.is_claimed(run, request)
    assert len(os.listdir("/dev/fd")) <= before


@pytest.mark.parametrize(
    ("said", "every_one"),
    [("{}", False), ("{keep: all}", True), ("{stop_after: 2}", True), ("{lower_rate_after: 2}", True)],
)
def test_which_runs_leave_no_evaluation_out(run: Path, said: str, every_one: bool) -> None:
    assert not evaluates_all(run)  # of no config nothing is known
    (run / "config.yaml").write_text(f"model: {{path: m}}\ndata: {{train: a, dev: b}}\nevaluate: {said}\n")
    assert evaluates_all(run) is every_one


def test_an_answer_waits_for_a_disk_that_takes_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It stays claimed, and why it waits is said once. Here another has the name of what is to be written."""
    request, in_the_way = ask(run, 3), run / "evals" / f"3-{EXAM}-1.items.json"
    in_the_way.mkdir()
    follower = threading.Thread(target=follow, args=(run, Recorder(), FollowOptions(once=True, poll=0.01)))
    follower.start()
    ends, told = time.monotonic() + 60, ""
    while "cannot be written" not in told and time.monotonic() < ends:
        told += capsys.readouterr().err
        time.sleep(0.01)
    time.sleep(0.3)
    assert ledger.is_claimed(run, request)
    assert is_leased(run / request.weights) is False  # it is read, and may go
    assert follower.is_alive()
    in_the_way.rmdir()
    follower.join(60)
    assert status(run) == {3: "done"}
    assert not ledger.is_claimed(run, request)
    assert ledger.read_sample_losses(run, request.stem) is not None
    told += capsys.readouterr().err
    assert told.count("the answer about step 3 waits, as it cannot be written: [Errno 21]") == 1


def test_a_broken_request_is_passed_over_and_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask(run, 3)
    (run / "evals" / f"6-{EXAM}-1.asked.json").write_text("{}")
    follow(run, Recorder(), ONCE)
    assert status(run) == {3: "done"}
    assert f"6-{EXAM}-1.asked.json" in capsys.readouterr().err
