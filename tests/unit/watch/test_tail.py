"""A run in a terminal: what was before in short, then what comes, until it ends."""

import io
import json
import socket
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from glm_accelerate.cli.main import main
from glm_accelerate.watch.run import WatchedRun
from glm_accelerate.watch.tail import SHOWN, SILENT, tail

BEGAN = time.time()
START = {"kind": "start", "step": 0, "steps": 60, "family": "glm4", "method": "lora", "device": "cpu"}


def step(number: int, seconds: float = 6.0) -> dict[str, Any]:
    return {
        "kind": "step", "step": number, "loss": 2.0, "tokens": 50, "seconds": 0.5,
        "time": BEGAN + number * seconds, "memory_bytes": 3 << 30, "learning_rate": 1e-4,
    }  # fmt: skip


def lines(*events: dict[str, Any]) -> str:
    return "".join(json.dumps({"attempt": 1, "time": BEGAN, **event}) + "\n" for event in events)


def shown(run: Path, *later: str) -> str:
    """What a tail shows that finds each of these when it looks again."""
    console, coming = Console(file=io.StringIO(), width=200), list(later)
    console.soft_wrap = True

    def pause(seconds: float) -> None:
        with (run / "events.jsonl").open("a") as file:
            file.write(coming.pop(0))

    tail(WatchedRun(run, "my"), console, pause)
    assert not coming
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_it_shows_the_end_of_what_was_and_what_comes(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"torn')
    before = [START, *map(step, range(1, 41)), {"kind": "decision", "said": "结果 [bold]"}]
    (tmp_path / "events.jsonl").write_text(lines(*before) + '{"kind": "step", "st')
    evaluated = {
        "kind": "eval", "step": 41, "status": "done", "loss": 1.5, "ci95": [1.4, 1.6], "samples": 8,
        "total": 8,
    }  # fmt: skip
    text = shown(
        tmp_path,
        "\n" + lines(step(41), evaluated),
        lines({"kind": "stop", "reason": "the stages move", "step": 41, "time": BEGAN + 250}),
        lines({**START, "kind": "resume", "step": 41, "time": BEGAN + 251}, step(42)),
        lines(step(43), {"kind": "stop", "reason": "done", "step": 43, "time": BEGAN + 260}),
    )
    assert "steps 1 to 60" in text
    assert f"step {40 - SHOWN}/60" not in text
    assert [f"step {n}/60 " in text for n in (41 - SHOWN, 40, 41, 42, 43)] == [True] * 5
    assert "decision 结果 [bold]" in text
    assert "evaluation step 41: loss 1.50 ±0.10" in text
    assert "held out 1.5000 (step 41) · 100 tokens/s · 3 GiB · rate 1.0e-04" in text
    assert text.splitlines()[-1].endswith("stopped at step 43: done")


def test_one_that_has_ended_or_was_killed_is_not_waited_for(tmp_path: Path) -> None:
    log, old = tmp_path / "events.jsonl", {"time": BEGAN - 2 * SILENT}
    assert shown(tmp_path, lines(START, {"kind": "stop", "reason": "SIGTERM", "step": 1})).startswith(
        "my has not begun"
    )
    log.write_text(lines({**START, **old}, {**step(3), **old}))
    (tmp_path / "lock").write_text(f"process 1 on {socket.gethostname()}, since 2026-11-23 UTC,")
    ended = lines({"kind": "stop", "reason": "done", "step": 3, "time": BEGAN})
    assert shown(tmp_path, "", ended).count("no event for") == 1
    log.write_text(lines({**START, **old}, {**step(3), **old}))
    (tmp_path / "lock").write_text(f"process 4194305 on {socket.gethostname()}, since 2026-11-23 UTC,")
    rank = {"rank": 1, "process": 7, "step": 3, "phase": "training", "silent": 40.0, "stopped": True}
    node = {
        "node": "n [bold]", "time": time.time(), "attempt": 1, "ended": False, "load": 1.5, "cores": 2,
        "memory": {"free": 1, "whole": 2}, "ranks": [rank], "others": [],
    }  # fmt: skip
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks/n.json").write_text(json.dumps(node))
    text = shown(tmp_path)
    assert "and process 4194305 is gone: it failed or was killed" in text
    assert "rank 1 on n [bold] is stopped by a signal: no sign for 40" in text
    assert main(["watch", str(tmp_path), str(tmp_path.parent), "--tail"]) == 2
