"""The ledger: one answer each whoever is first, claims that end with their holder, branches given up."""

import errno
import json
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from glm_accelerate.evaluate.protocol import ledger
from glm_accelerate.evaluate.protocol.messages import (
    Comparison,
    EvaluationResult,
    Findings,
    Prediction,
    Request,
)
from glm_accelerate.evaluate.statistics.intervals import SampleLosses
from glm_accelerate.runtime.errors import UserError

PLAN = "0123abcd"
ITEMS = SampleLosses(np.array([1.5, 0.1, 2.25]), np.array([3.0, 1.0, 4.0]))
PREDICTION = Prediction("问?", "答", "an answer", {"exact_match": 0.0})


def asked(step: int, attempt: int = 1) -> Request:
    return Request(step, PLAN, attempt, f"snapshots/snapshot-{step}")


def found(step: int, attempt: int = 1, loss: float = 2.0, samples: int = 3) -> Findings:
    result = EvaluationResult(step, PLAN, attempt, "done", loss=loss, samples=samples, total=9)
    return Findings(result, ITEMS, (PREDICTION,))


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "evals").iterdir())


def test_from_asked_to_answered(tmp_path: Path) -> None:
    for step in (12, 3):
        ledger.post(tmp_path, asked(step))
    assert [request.step for request in ledger.waiting(tmp_path)] == [3, 12]
    assert ledger.read(tmp_path, asked(3).stem) is None
    with ledger.claim(tmp_path, asked(3)) as mine:
        assert mine
        assert ledger.is_claimed(tmp_path, asked(3))
        assert str(os.getpid()) in (tmp_path / "evals" / f"{asked(3).stem}.claim").read_text()
        assert ledger.publish(tmp_path, found(3))
    assert ledger.waiting(tmp_path) == [asked(12)]
    (result,) = ledger.results(tmp_path)
    assert result == found(3).result
    items = ledger.read_sample_losses(tmp_path, result.stem)
    assert items is not None
    assert (items.losses_N.tolist(), items.targets_N.tolist()) == ([1.5, 0.1, 2.25], [3.0, 1.0, 4.0])
    line = (tmp_path / "evals" / f"{result.stem}.predictions.jsonl").read_text(encoding="utf-8")
    assert line.endswith("\n")
    assert json.loads(line)["prompt"] == "问?"
    stem = result.stem
    assert names(tmp_path) == sorted(
        [
            f"{asked(12).stem}.asked.json",
            f"{stem}.items.json",
            f"{stem}.json",
            f"{stem}.predictions.jsonl",
        ]
    )


def test_nobody_else_reads_it_whatever_the_umask(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Predictions are private conversations."""
    before = os.umask(0)
    request.addfinalizer(lambda: os.umask(before))
    question = asked(4)
    ledger.post(tmp_path / "run", question)
    with ledger.claim(tmp_path / "run", question) as ours:
        assert ours
        modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "run" / "evals").iterdir()}
        assert len(modes) == 2
        assert ledger.publish(tmp_path / "run", found(4))
    folders = [tmp_path / "run", tmp_path / "run" / "evals"]
    files = [*(tmp_path / "run" / "evals").iterdir()]
    assert {*modes.values(), *(path.stat().st_mode & 0o777 for path in files)} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}


def test_a_claim_is_one_holders(tmp_path: Path) -> None:
    ledger.post(tmp_path, asked(3))
    with ledger.claim(tmp_path, asked(3)) as mine, ledger.claim(tmp_path, asked(3)) as another:
        assert (mine, another) == (True, False)
    assert not ledger.is_claimed(tmp_path, asked(3))
    with ledger.claim(tmp_path, asked(3)) as mine:
        assert mine
        ledger.withdraw(tmp_path, asked(3), "skipped", "step 6 is newer")
    with ledger.claim(tmp_path, asked(3)) as mine:
        assert not mine
    with ledger.claim(tmp_path, asked(4)) as mine:  # nobody has asked
        assert not mine
    assert names(tmp_path) == [f"{asked(3).stem}.json"]


def _hold(run: Path) -> None:
    with ledger.claim(run, asked(3)) as mine:
        os.kill(os.getpid(), signal.SIGKILL if mine else signal.SIGTERM)


@pytest.mark.process
def test_a_claim_ends_with_its_holder(tmp_path: Path) -> None:
    ledger.post(tmp_path, asked(3))
    holder = multiprocessing.get_context("spawn").Process(target=_hold, args=(tmp_path,))
    holder.start()
    holder.join(60)
    assert holder.exitcode == -signal.SIGKILL
    assert (tmp_path / "evals" / f"{asked(3).stem}.claim").is_file()
    assert not ledger.is_claimed(tmp_path, asked(3))
    with ledger.claim(tmp_path, asked(3)) as mine:
        assert mine


def test_the_first_answer_stays(tmp_path: Path) -> None:
    ledger.post(tmp_path, asked(3))
    assert ledger.publish(tmp_path, found(3, loss=2.0))
    assert not ledger.publish(tmp_path, found(3, loss=9.0))
    assert not ledger.withdraw(tmp_path, asked(3), "timeout", "no result in 5 s")
    ledger.post(tmp_path, asked(3))
    assert ledger.waiting(tmp_path) == []
    assert [result.loss for result in ledger.results(tmp_path)] == [2.0]
    assert ledger.read_sample_losses(tmp_path, asked(3).stem) is not None


def test_an_answer_that_comes_too_late_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer says `timeout` between an evaluator's items and its result."""
    ledger.post(tmp_path, asked(3))
    link, said = os.link, list[bool]()

    def slow(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        said.append(ledger.withdraw(tmp_path, asked(3), "timeout", "no result in 5 s"))
        link(source, target)

    monkeypatch.setattr(os, "link", slow)
    assert not ledger.publish(tmp_path, found(3))
    assert said == [True]
    assert [result.status for result in ledger.results(tmp_path)] == ["timeout"]
    assert names(tmp_path) == [f"{asked(3).stem}.json"]
    assert ledger.read_sample_losses(tmp_path, asked(3).stem) is None


@pytest.mark.parametrize("links", [True, False])
def test_of_many_at_once_one_publishes(tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "no links on this disk")

    if not links:
        monkeypatch.setattr(os, "link", none)
    start = threading.Barrier(8)

    def publish(number: int) -> bool:
        start.wait()
        result = EvaluationResult(step, PLAN, 1, "failed", reason=f"number {number}")
        return ledger.publish(tmp_path, Findings(result))

    with ThreadPoolExecutor(8) as pool:
        for step in range(10):
            won = list(pool.map(publish, range(8)))
            result = ledger.read(tmp_path, asked(step).stem)
            assert sum(won) == 1
            assert result is not None
            assert result.reason == f"number {won.index(True)}"
    assert {name for name in names(tmp_path) if name != ".publishing"} == {
        f"{asked(s).stem}.json" for s in range(10)
    }


def test_a_link_that_was_made_though_an_error_was_heard_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over a network, where an answer gets lost and the question is put again."""
    link = os.link

    def twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", twice)
    assert ledger.publish(tmp_path, found(3))


def test_a_full_disk_leaves_nothing_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    ledger.post(tmp_path, asked(3))
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", full)
        with pytest.raises(OSError, match="No space"):
            ledger.publish(tmp_path, found(3))
    assert ledger.read(tmp_path, asked(3).stem) is None
    assert ledger.waiting(tmp_path) == [asked(3)]
    assert ledger.publish(tmp_path, found(3))


def test_more_of_the_step_compared_with_is_kept(tmp_path: Path) -> None:
    ledger.publish(tmp_path, found(3))
    grown = SampleLosses(np.arange(5.0), np.ones(5))
    compared = Comparison(3, asked(3).stem, 0.1, (0.0, 0.2), "undecided", 2, 2)
    result = EvaluationResult(6, PLAN, 1, "done", loss=2.1, samples=5, against=compared)
    assert ledger.publish(tmp_path, Findings(result, grown, baseline_losses=grown))
    items = ledger.read_sample_losses(tmp_path, asked(3).stem)
    assert items is not None
    assert len(items.losses_N) == 5
    fewer = EvaluationResult(9, PLAN, 1, "done", loss=2.2, samples=3, against=compared)
    assert ledger.publish(tmp_path, Findings(fewer, ITEMS, baseline_losses=ITEMS))
    items = ledger.read_sample_losses(tmp_path, asked(3).stem)
    assert items is not None
    assert len(items.losses_N) == 5


def test_what_is_no_number_is_never_written(tmp_path: Path) -> None:
    result = EvaluationResult(3, PLAN, 1, "done", loss=float("nan"), metrics={"own": float("nan")}, samples=3)
    assert ledger.publish(tmp_path, Findings(result, ITEMS))
    text = (tmp_path / "evals" / f"{asked(3).stem}.json").read_text()
    assert "NaN" not in text
    (said,) = ledger.results(tmp_path)
    assert (said.status, said.loss, said.metrics) == ("failed", None, {})
    assert ledger.read_sample_losses(tmp_path, asked(3).stem) is None


def test_a_broken_file_costs_itself_alone(tmp_path: Path) -> None:
    for step in (3, 6):
        ledger.publish(tmp_path, found(step))
        ledger.post(tmp_path, asked(step + 1))
    folder = tmp_path / "evals"
    (folder / f"{asked(3).stem}.json").write_text('{"step": 3')
    (folder / f"{asked(4).stem}.asked.json").write_bytes(b"\xff\xfe")
    for name in ("notes.txt", "3-0123abcd-1.json.bak", "03-0123abcd-1.json", "７-0123abcd-1.asked.json"):
        (folder / name).write_text("{}")
    there = ledger.listing(tmp_path)
    assert [result.step for result in there.results] == [6]
    assert [request.step for request in there.waiting] == [7]
    assert len(there.passed_over) == 2
    assert all(path in "".join(there.passed_over) for path in (asked(3).stem, asked(4).stem))
    with pytest.raises(UserError, match=asked(3).stem):
        ledger.read(tmp_path, asked(3).stem)
    (folder / f"{asked(6).stem}.items.json").write_text('{"losses": [1.0], "targets": []}')
    with pytest.raises(UserError, match=r"items\.json"):
        ledger.read_sample_losses(tmp_path, asked(6).stem)


def test_a_branch_that_is_given_up_moves_aside(tmp_path: Path) -> None:
    for step in (3, 6, 9):
        ledger.publish(tmp_path, found(step))
        (tmp_path / "snapshots" / f"snapshot-{step}").mkdir(parents=True)
    ledger.post(tmp_path, asked(12))
    (tmp_path / "snapshots" / "snapshot-012").mkdir()
    moved = ledger.abandon_after(tmp_path, 6, 2)
    assert f"{asked(9).stem}.json" in moved
    assert "snapshot-9" in moved
    assert [result.step for result in ledger.results(tmp_path)] == [3, 6]
    assert ledger.waiting(tmp_path) == []
    assert sorted(path.name for path in (tmp_path / "snapshots").iterdir()) == [
        "snapshot-012",
        "snapshot-3",
        "snapshot-6",
    ]
    assert (tmp_path / "abandoned" / f"{asked(9).stem}.items.json").is_file()
    assert (tmp_path / "abandoned" / f"{asked(12).stem}.asked.json").is_file()
    ledger.publish(tmp_path, found(9, attempt=2))
    (tmp_path / "snapshots" / "snapshot-9").mkdir()
    ledger.abandon_after(tmp_path, 6, 3)
    assert (tmp_path / "abandoned" / "snapshot-9.1").is_dir()


def test_a_late_answer_of_a_branch_that_was_given_up_is_dropped(tmp_path: Path) -> None:
    """An evaluator is at step 9 of attempt 1 while attempt 2 goes on from 6."""
    ledger.publish(tmp_path, found(3))
    ledger.post(tmp_path, asked(9))
    with ledger.claim(tmp_path, asked(9)) as mine:
        assert mine
        ledger.abandon_after(tmp_path, 6, 2)
        ledger.post(tmp_path, asked(9, attempt=2))
        assert not ledger.publish(tmp_path, found(9))
    assert ledger.waiting(tmp_path) == [asked(9, attempt=2)]
    with ledger.claim(tmp_path, asked(9, attempt=2)) as mine:
        assert mine
    # Even one that lands in the very moment between its last look and the name is never listed.
    stem = asked(9).stem
    text = json.dumps({"step": 9, "plan": PLAN, "attempt": 1, "status": "done", "loss": 0.5})
    (tmp_path / "evals" / f"{stem}.json").write_text(text)
    assert [result.step for result in ledger.results(tmp_path)] == [3]
    # What was asked before the branch is still its attempt's to answer.
    assert ledger.publish(tmp_path, found(6))


ROUNDS = 10


def _publish_all(run: Path) -> None:
    """An evaluator that answers eight at a time, in each attempt until that is given up."""

    def publish(first: int) -> None:
        for attempt in range(1, ROUNDS + 1):
            step, goes_on = first, True
            while goes_on:
                ledger.post(run, asked(step, attempt))
                goes_on = ledger.publish(run, found(step, attempt))
                step += 8

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(publish, range(9000, 9008)))


@pytest.mark.process
def test_what_is_published_while_a_branch_is_given_up_hinders_nobody(tmp_path: Path) -> None:
    """Requests go as they are answered, between the moment that they are listed and that they would move."""
    folder = tmp_path / "evals"
    folder.mkdir()
    evaluator = multiprocessing.get_context("spawn").Process(target=_publish_all, args=(tmp_path,))
    evaluator.start()
    try:
        for attempt in range(1, ROUNDS + 1):
            for step in range(100, 300):  # they move before those that are being answered
                (folder / f"{asked(step, attempt).stem}.asked.json").touch()
            ends = time.monotonic() + 60
            while not list(folder.glob(f"9*-{PLAN}-{attempt}.json")):
                assert time.monotonic() < ends
                assert evaluator.is_alive()
            ledger.abandon_after(tmp_path, 0, attempt + 1)
        evaluator.join(60)
        assert evaluator.exitcode == 0
    finally:
        evaluator.kill()
    assert ledger.listing(tmp_path) == ledger.Listing([], [], [])


def test_leftovers_of_killed_evaluators_are_swept(tmp_path: Path) -> None:
    ledger.publish(tmp_path, found(3))
    ledger.post(tmp_path, asked(6))
    folder = tmp_path / "evals"
    for name in (f"{asked(3).stem}.claim", f"{asked(3).stem}.asked.json", f".{asked(3).stem}.items.json.x1"):
        (folder / name).touch()
    (folder / f"{asked(6).stem}.claim").touch()
    ledger.sweep(tmp_path)
    assert [name for name in names(tmp_path) if name.startswith((".", "3-"))] == [
        f"{asked(3).stem}.items.json",
        f"{asked(3).stem}.json",
        f"{asked(3).stem}.predictions.jsonl",
    ]
    assert (folder / f"{asked(6).stem}.claim").is_file()


def test_a_run_without_evaluations(tmp_path: Path) -> None:
    assert ledger.listing(tmp_path) == ledger.Listing([], [], [])
    assert ledger.abandon_after(tmp_path, 3, 2) == []
    assert not ledger.is_claimed(tmp_path, asked(3))
