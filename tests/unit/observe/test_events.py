import json
import math
import os
import random
from pathlib import Path

import pytest

from glm_accelerate.observe.events import Event, EventLog, Events, last_attempt, read_events, strict_json


class Listener:
    """Remembers what it saw; its disk may be full."""

    def __init__(self, full: bool = False) -> None:
        self.seen: list[Event] = []
        self.full = full

    def observe(self, event: Event) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        self.seen.append(event)

    def close(self) -> None:
        if self.full:
            raise OSError(28, "No space left on device")


def log(path: Path, attempt: int, *happened: tuple[str, dict[str, object]]) -> None:
    events = Events([EventLog(path)], attempt)
    for kind, fields in happened:
        events.emit(kind, fields)
    events.close()


def test_a_line_is_strict_json_with_time_kind_and_attempt(tmp_path: Path) -> None:
    log(
        tmp_path / "e",
        3,
        ("step", {"step": 1, "loss": math.nan, "ci95": (math.inf, 1.0), "of": {"a": -math.inf}}),
    )
    line = (tmp_path / "e").read_text(encoding="utf-8")
    assert line.index("\n") == len(line) - 1
    event = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert event.pop("time") > 1.7e9
    assert event == {
        "kind": "step", "attempt": 3, "step": 1, "loss": None, "ci95": [None, 1.0], "of": {"a": None},
    }  # fmt: skip


def test_a_torn_last_line_is_passed_over_and_the_next_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log(path, 1, ("step", {"step": 1, "loss": 2.0}), ("step", {"step": 2, "loss": 1.0}))
    whole = path.read_bytes()
    for kept in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:kept])
        log(path, 2, ("warning", {"said": "after"}))
        read = read_events(path)
        complete = 2 if kept == len(whole) - 1 else 1  # only the line end was missing
        assert [event["kind"] for event in read] == ["step"] * complete + ["warning"]
        assert last_attempt(path) == 2


def test_each_event_is_on_disk_at_once_and_after_what_others_wrote(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    first, second = EventLog(path), EventLog(path)
    for number in range(4):
        (first, second)[number % 2].observe({"kind": "step", "step": number, "attempt": 1})
        assert len(read_events(path)) == number + 1
    first.close()
    second.close()


def test_a_log_may_keep_some_kinds_only(tmp_path: Path) -> None:
    only = EventLog(tmp_path / "evals.jsonl", kinds=("eval",))
    events = Events([only], 1)
    events.emit("step", {"step": 1})
    events.emit("eval", {"step": 1, "loss": 1.0})
    events.close()
    assert [event["kind"] for event in read_events(tmp_path / "evals.jsonl")] == ["eval"]


def test_the_highest_attempt_wins(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    steps = [("step", {"step": number, "loss": 10.0 + number}) for number in range(1, 6)]
    log(path, 1, ("start", {"step": 0}), *steps, ("eval", {"step": 2, "loss": 7.0}))
    log(path, 2, ("resume", {"step": 2}), ("step", {"step": 3, "loss": 3.0}))
    read = read_events(path)
    assert [event["kind"] for event in read if event["kind"] in ("start", "resume")] == ["start", "resume"]
    # Steps 4 and 5 were lost with the first attempt, and the second has not done them yet.
    assert [(e["step"], e["loss"]) for e in read if e["kind"] == "step"] == [(1, 11.0), (2, 12.0), (3, 3.0)]
    assert [event["loss"] for event in read if event["kind"] == "eval"] == [7.0]


def test_starting_anew_leaves_nothing_of_the_first_attempt(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log(path, 1, ("start", {"step": 0}), ("step", {"step": 1, "loss": 5.0}))
    log(path, 2, ("start", {"step": 0}))
    assert [event["kind"] for event in read_events(path)] == ["start", "start"]


def steps(first: int, last: int) -> list[tuple[str, dict[str, object]]]:
    return [("step", {"step": step}) for step in range(first, last + 1)]


def seen(path: Path) -> list[tuple[object, object]]:
    return [(event["attempt"], event["step"]) for event in read_events(path) if event["kind"] == "step"]


def test_a_branch_that_came_to_nothing_is_no_part_of_the_run(tmp_path: Path) -> None:
    """From step 2 once more, killed before its first checkpoint: the run goes on from where it was. What that
    branch heard of the step before it still counts.
    """
    path = tmp_path / "events.jsonl"
    log(path, 1, ("start", {"step": 0}), *steps(1, 2), ("checkpoint", {"step": 2}), *steps(3, 5))
    log(path, 2, ("resume", {"step": 2, "of": 1}), ("eval", {"step": 2}), *steps(3, 5))
    assert seen(path) == [(1, 1), (1, 2), (2, 3), (2, 4), (2, 5)]
    log(path, 3, ("resume", {"step": 4, "of": 1}), *steps(5, 6), ("checkpoint", {"step": 6}))
    assert seen(path) == [(1, 1), (1, 2), (1, 3), (1, 4), (3, 5), (3, 6)]
    assert [event["attempt"] for event in read_events(path) if event["kind"] == "eval"] == [2]


def test_a_log_that_does_not_say_whose_checkpoints_were_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log(path, 1, ("start", {"step": 0}), *steps(1, 4), ("checkpoint", {"step": 4}), *steps(5, 5))
    log(path, 2, ("resume", {"step": 2}), *steps(3, 5))
    log(path, 3, ("resume", {"step": 4}), *steps(5, 6))
    assert seen(path) == [(1, 1), (1, 2), (1, 3), (1, 4), (3, 5), (3, 6)]


@pytest.mark.parametrize("seed", range(40))
def test_the_run_is_what_its_newest_attempt_has_behind_it(seed: int, tmp_path: Path) -> None:
    """Attempts begin anew or at anything that was ever saved; a killed one has not told of all its saves."""
    draw, path = random.Random(seed), tmp_path / "events.jsonl"
    saved: list[tuple[int, list[tuple[int, int]]]] = []  # by whom, and what is behind it
    behind: list[tuple[int, int]] = []
    for attempt in range(1, draw.randint(2, 7)):
        who, found = draw.choice(saved) if saved and draw.random() < 0.8 else (0, [])
        behind = list(found)
        events: list[tuple[str, dict[str, object]]] = [
            ("resume" if who else "start", {"step": len(behind), "of": who})
        ]
        for step in range(len(behind) + 1, len(behind) + draw.randint(1, 9)):
            behind.append((attempt, step))
            events.append(("step", {"step": step}))
            if draw.random() < 0.4:
                saved.append((attempt, list(behind)))
                events += [("checkpoint", {"step": step})] if draw.random() < 0.5 else []
        log(path, attempt, *events)
    assert seen(path) == behind


def test_no_log_has_no_events_and_no_attempt(tmp_path: Path) -> None:
    assert read_events(tmp_path / "none") == []
    assert last_attempt(tmp_path / "none") == 0


def test_the_last_attempt_is_found_at_the_end_of_a_long_log(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = (strict_json({"kind": "step", "step": step, "attempt": step // 1000}) for step in range(5000))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert last_attempt(path) == 4


def test_an_observer_with_a_full_disk_writes_again_when_there_is_room() -> None:
    full, well = Listener(full=True), Listener()
    events = Events([full, well], 1)
    events.emit("step", {"step": 1})
    events.emit("step", {"step": 2})
    assert [event["kind"] for event in well.seen] == ["step", "warning", "step"]
    assert "Listener is left out until there is room: [Errno 28] No space left" in str(well.seen[1]["said"])
    full.full = False
    events.emit("step", {"step": 3})
    assert [event.get("step") for event in full.seen] == [3, None]
    assert "Listener writes again: 3 events are missing there" in str(full.seen[1]["said"])
    assert well.seen[-1] == full.seen[-1]


def test_closing_reaches_everyone_although_one_fails(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    kept = EventLog(path)
    events = Events([Listener(full=True), kept], 1)
    events.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        kept.observe({"kind": "step"})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_really_full_device_never_stops_training(tmp_path: Path) -> None:
    link = tmp_path / "events.jsonl"
    os.symlink("/dev/full", link)
    well = Listener()
    events = Events([EventLog(link), well], 1)
    events.emit("step", {"step": 1})
    events.close()
    assert [event["kind"] for event in well.seen] == ["step", "warning"]
