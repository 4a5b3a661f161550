"""The demo as a person runs it, only shorter: all that it promises is there, nothing overwritten."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from glm_accelerate.observe.events import read_events


def demo(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "glm_accelerate.cli.main", "demo", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def test_a_short_demo_is_interrupted_goes_on_and_says_that_it_learnt_too_little(tmp_path: Path) -> None:
    done = demo("--steps", "4", cwd=tmp_path)
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
    refused = demo("--run", "runs/demo", cwd=tmp_path)
    assert refused.returncode == 2
    assert "there is something already" in refused.stderr


def test_fewer_than_two_steps_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    refused = demo("--steps", "1", cwd=tmp_path)
    assert refused.returncode == 2
    assert not (tmp_path / "runs").exists()
