"""`evaluate RUN --follow` after training: in which order it answers, and what a disk that refuses costs."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from glm_accelerate.cli.main import main
from glm_accelerate.evaluate.protocol.ledger import results


def train(said: dict[str, Any], directory: Path, run: Path) -> int:
    """It asks three times, and nobody answers."""
    evaluate = {"every": 7, "where": "external", "patience": 0, "keep": "all"}
    config = {**said, "evaluate": evaluate, "precision": {"compute": "float32"}}
    (directory / "my.yaml").write_text(yaml.safe_dump(config))
    return main(["train", str(directory / "my.yaml"), "--run", str(run)])


def fill(disk: Path) -> Path:
    """To the last byte. Returns what is to be deleted, so that there is room again."""
    with (disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(bytes(4096)):
            pass
    return disk / "filler"


def test_the_oldest_first_where_all_count(
    tiny_run: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whoever follows when training has ended begins at the beginning."""
    run = tmp_path / "run"
    assert train(tiny_run, tmp_path, run) == 0
    capfd.readouterr()
    assert main(["evaluate", str(run), "--follow", "--once"]) == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if line.endswith("evaluating")]
    assert lines == ["step 0: evaluating", "step 7: evaluating", "step 14: evaluating"]


def test_what_was_asked_under_another_plan_keeps_nobody_waiting(
    tiny_run: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The trainer asks otherwise when it goes on: nobody looks for answers to what it asked before."""
    run = tmp_path / "run"
    assert train(tiny_run, tmp_path, run) == 0
    config = yaml.safe_load((tmp_path / "my.yaml").read_text())
    config["evaluate"]["metrics"] = ["loss", "exact_match"]
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    words = ["train", str(tmp_path / "my.yaml"), "--run", str(run), "--accept", "config"]
    assert main(words) == 0
    capfd.readouterr()
    assert main(["evaluate", str(run), "--follow", "--once"]) == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if line.endswith("evaluating")]
    assert lines == ["step 14: evaluating"]
    assert [(result.step, result.status, result.attempt) for result in results(run)] == [
        (0, "skipped", 1), (7, "skipped", 1), (14, "skipped", 1), (14, "done", 2),
    ]  # fmt: skip


def test_a_disk_that_refuses_is_no_bug(
    tiny_run: dict[str, Any],
    mount: Callable[..., Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A run on a full disk, then on one that is read-only: one line, and 2."""
    disk = mount(tmp_path / "disk", "-t", "tmpfs", "-o", "size=8m", "tmpfs")
    full = "No space left on device (make room, then run the same again)"
    filler = fill(disk)
    assert train(tiny_run, tmp_path, disk / "run") == 2
    assert capfd.readouterr().err.splitlines()[-1].endswith(full)
    filler.unlink()
    assert train(tiny_run, tmp_path, disk / "run") == 0
    filler = fill(disk)
    words = ["evaluate", str(disk / "run"), "--follow", "--once"]
    capfd.readouterr()
    assert main(words) == 2
    told = capfd.readouterr().err
    assert told.splitlines()[-1].endswith(full)
    assert "Traceback" not in told
    filler.unlink()
    mount(disk, "-o", "remount,ro")
    assert main(words) == 2
    told = capfd.readouterr().err
    assert told.splitlines()[-1].startswith(f"error: {disk}/run/evals/0-")
    assert told.splitlines()[-1].endswith(
        ".claim: Read-only file system (let this user read and write there, or name another place)"
    )
    assert "Traceback" not in told
