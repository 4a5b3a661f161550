"""The demo as a person runs it, only shorter: all that it promises is there, nothing overwritten."""

import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

from glm_accelerate.observe.events import read_events
from tests.warm import Warm


def test_a_short_demo_is_interrupted_goes_on_and_says_that_it_learnt_too_little(
    tmp_path: Path, warm: Callable[..., Warm]
) -> None:
    done = warm("demo", "--steps", "4", cwd=tmp_path).done()
    assert done.returncode == 1, done.stderr
    assert "Not solved" in done.stdout
    assert "Interrupted on purpose" in done.stdout
    run = tmp_path / "runs" / "demo"
    events = read_events(run / "events.jsonl")
    assert [event["step"] for event in events if event["kind"] == "step"] == [1, 2, 3, 4]
    assert [(event["kind"], event["step"]) for event in events if event["kind"] in ("resume", "stop")] == [
        ("stop", 2),
        ("resume", 2),
        ("stop", 4),
    ]
    evals = [json.loads(line) for line in (run / "evals.jsonl").read_text().splitlines()]
    assert evals[0]["step"] == 0
    assert evals[0]["metrics"]["exact_match"] < 0.05
    assert (run / "checkpoints" / "checkpoint-4").is_dir()
    ElementTree.fromstring((run / "loss.svg").read_text(encoding="utf-8"))

    # A second one takes the next name; one that is told to use a full directory refuses.
    refused = warm("demo", "--run", "runs/demo", cwd=tmp_path).done()
    assert refused.returncode == 2
    assert "there is something already" in refused.stderr


def test_fewer_than_two_steps_are_refused_before_anything_is_written(
    tmp_path: Path, warm: Callable[..., Warm]
) -> None:
    refused = warm("demo", "--steps", "1", cwd=tmp_path).done()
    assert refused.returncode == 2
    assert not (tmp_path / "runs").exists()
