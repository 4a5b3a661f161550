"""What the page is told of a run directory."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from glm_accelerate.watch.run import BLOCK, LATE, MOST_ANSWERS, MOST_STEPS, WatchedRun


def step(number: int) -> str:
    fields = {
        "time": 1.7e9 + number,
        "kind": "step",
        "attempt": 1,
        "step": number,
        "loss": 2.0,
        "padding": "x" * 250,
    }
    return json.dumps(fields) + "\n"


def steps_of(found: dict[str, object]) -> list[int]:
    events = found["events"]
    assert isinstance(events, list)
    return [event["step"] for event in events if event["kind"] == "step"]


def test_events_come_once_and_a_torn_line_when_it_is_whole(tmp_path: Path) -> None:
    run, log = WatchedRun(tmp_path, "run"), tmp_path / "events.jsonl"
    assert run.events(0) == {"events": [], "next": 0, "every": 1}  # it has not begun
    whole = (
        step(1) + '{"time": 1, "kind": "de\n' + json.dumps({"kind": "decision", "said": "结果 <b>"}) + "\n"
    )
    log.write_text(whole + step(2)[:40], encoding="utf-8")
    found = run.events(0)
    assert [event["kind"] for event in found["events"]] == ["step", "decision"]
    assert found["events"][1]["said"] == "结果 <b>"
    assert found["next"] == len(whole.encode())
    assert run.events(found["next"])["events"] == []
    log.write_text(whole + step(2) + step(3), encoding="utf-8")
    assert steps_of(run.events(found["next"])) == [2, 3]


def test_a_long_log_is_thinned_but_for_what_is_no_step(tmp_path: Path) -> None:
    many = 10 * MOST_STEPS + 7
    with (tmp_path / "events.jsonl").open("w") as file:
        for number in range(1, many + 1):
            file.write(step(number))
            if number % 1000 == 0:
                file.write(json.dumps({"kind": "checkpoint", "step": number}) + "\n")
        assert file.tell() < BLOCK or many  # one block or several
    found = WatchedRun(tmp_path, "run").events(0)
    steps = steps_of(found)
    assert MOST_STEPS / 2 < len(steps) < 2 * MOST_STEPS
    assert steps[-1] == many
    assert steps == sorted(set(steps))
    assert found["every"] > 1
    assert sum(event["kind"] == "checkpoint" for event in found["events"]) == many // 1000


def test_lines_that_cross_a_block_are_whole(tmp_path: Path) -> None:
    said = ["界" * (BLOCK // 7), "b", "c" * (BLOCK // 2), "d" * BLOCK]
    lines = [json.dumps({"kind": "warning", "said": text}, ensure_ascii=False) + "\n" for text in said]
    (tmp_path / "events.jsonl").write_text("".join(lines), encoding="utf-8")
    found = WatchedRun(tmp_path, "run").events(0)
    assert [event["said"] for event in found["events"]] == said


def test_a_log_that_begins_anew_is_read_from_its_start(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    log.write_text(step(1) + step(2))
    end = WatchedRun(tmp_path, "run").events(0)["next"]
    log.write_text(step(7))
    found = WatchedRun(tmp_path, "run").events(end)
    assert steps_of(found) == [7]
    assert found["next"] < end


def test_the_first_answers_of_an_evaluation(tmp_path: Path) -> None:
    (tmp_path / "evals").mkdir()
    for stem, count in (("3-a-1", 30), ("31-a-1", 1)):
        lines = [json.dumps({"prompt": f"{stem} {n}", "answer": "<script>"}) + "\n" for n in range(count)]
        (tmp_path / f"evals/{stem}.predictions.jsonl").write_text("".join(lines))
    found = WatchedRun(tmp_path, "run").answers(3)
    assert [one["prompt"] for one in found] == [f"3-a-1 {n}" for n in range(MOST_ANSWERS)]
    assert WatchedRun(tmp_path, "run").answers(4) == []


def test_a_run_that_is_no_run_is_shown_as_waiting(tmp_path: Path) -> None:
    assert WatchedRun(tmp_path, "run").about() == {"name": "run", "memory": None, "reasons": []}
    (tmp_path / "plan.json").write_text('{"memory": 3')
    assert WatchedRun(tmp_path, "run").about()["memory"] is None


def node(name: str = "n", seconds: float = 0.0, **more: Any) -> str:
    """A node's file, of two ranks, that was written so many seconds ago."""
    rank = {"process": 7, "step": 3, "phase": "training", "silent": 0.5, "stopped": False}
    said = {
        "node": name, "time": time.time() - seconds, "attempt": 1, "ended": False, "load": 1.5, "cores": 2,
        "memory": {"free": 1, "whole": 2}, "ranks": [{"rank": 1, **rank}, {"rank": 0, **rank}], "others": [],
    }  # fmt: skip
    return json.dumps(said | more)


def test_nodes_are_read_as_they_are_now(tmp_path: Path) -> None:
    run, folder = WatchedRun(tmp_path, "run"), tmp_path / "ranks"
    assert run.nodes() == run.missed() == []
    folder.mkdir()
    (folder / "late.json").write_text(node("late", LATE + 10))
    stopped = {"process": 8, "step": 3, "phase": "saving", "silent": 6.0, "stopped": True}
    quiet = [{"rank": 3, **stopped}, {"rank": 4, **stopped, "stopped": False}, {"rank": 2, "process": None}]
    (folder / "quiet.json").write_text(node("quiet", ranks=quiet))
    first, second = run.nodes()
    assert [(each["rank"], each["state"]) for each in first["ranks"]] == [(0, "silent"), (1, "silent")]
    assert first["age"] == pytest.approx(LATE + 10, abs=2)
    states = [(each["rank"], each["state"]) for each in second["ranks"]]
    assert states == [(2, "gone"), (3, "stopped"), (4, "silent")]
    assert second["ranks"][1]["seconds"] == pytest.approx(6, abs=2)
    missed = run.missed()
    assert len(missed) == 5
    assert missed[2] == "rank 2 on quiet is gone"
    assert missed[3].startswith("rank 3 on quiet is stopped by a signal: no sign for 6")
    (folder / "quiet.json").write_text(node("quiet", attempt=2))
    assert [each["node"] for each in run.nodes()] == ["quiet", "late"]
    assert run.missed() == []  # the other one takes no part any more


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        '"text"',
        "\xff",
        node()[:-5],
        node(ranks=[]),
        node(ranks=[3]),
        node(ranks=3),
        node(load="1"),
        node(load=float("nan")),
        node(time=1e400),
        node(memory=[]),
        node(others=[{}]),
        node(attempt=None),
        "[" * 100_000,
        '{"time": ' + "9" * 10_000 + "}",
    ],
)
def test_a_torn_or_foreign_file_hides_no_other(text: str, tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks/a.json").write_text(text, encoding="latin-1")
    (tmp_path / "ranks/b.json").write_text(node("good"))
    nodes = WatchedRun(tmp_path, "run").nodes()
    assert [each["node"] for each in nodes] == ["good"]
    json.dumps(nodes, allow_nan=False)  # what a browser can read
