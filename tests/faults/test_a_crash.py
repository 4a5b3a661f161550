"""A. Crashes during a save: of the trainer, of the writer, at the disk. See README.md for the other cases."""

import array
import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "system"))

from kill_sweep import points, saver, trace

from glm_accelerate.checkpoint.audit import audit
from glm_accelerate.checkpoint.find import published
from glm_accelerate.checkpoint.format import FOLDER, Manifest
from glm_accelerate.runtime.errors import UserError
from tests.checkpoints import write_manifest

WHY_NOT = trace.why_not()
traced = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it can run here")
procfs = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the writer in /proc")
Event = dict[str, Any]

TIDY = """
import sys, time
from pathlib import Path
from glm_accelerate.checkpoint.retain import choose_stale, delete, present
from glm_accelerate.config.schema import CheckpointSection
run, section = Path(sys.argv[1]), CheckpointSection(keep_last=1, keep_best=1)
delete(run, choose_stale(present(run, run_id="mine", losses={1: 0.5}), section, time.time()))
"""


@traced
def test_a3_killed_while_deleting(tmp_path: Path) -> None:
    """At every call that changes something: a victim is whole or no checkpoint, and the next time ends it."""

    def tidy(*inject: str) -> list[trace.Call]:
        run, log = tmp_path / "run", tmp_path / "log"
        shutil.rmtree(run, ignore_errors=True)
        for step in (1, 2, 3):
            path = run / FOLDER / f"checkpoint-{step}"
            path.mkdir(parents=True)
            write_manifest(path, Manifest(step, 1, {}, {}, run="mine"))
        calls = ",".join("?" + call for call in trace.CALLS)
        words = ["strace", "-f", "-y", "-s0", "-o", str(log), "-e", f"trace={calls}", *inject]
        subprocess.run([*words, sys.executable, "-B", "-c", TIDY, str(run)], check=False)
        return [call for call in trace.read(log) if call.changes(run)]

    left = {"checkpoint-1", "checkpoint-3"}  # the best and the newest
    whole = tidy()
    assert {call.name for call in whole} >= {"rename", "unlinkat"}
    for call in whole:
        tidy("-e", f"inject={call.name}:signal=KILL:when={call.number}")
        there = published(tmp_path / "run")
        assert {path.name for path in there} in (left, left | {"checkpoint-2"}), call
        assert not any(audit(path).damaged for path in there), call
        subprocess.run([sys.executable, "-B", "-c", TIDY, str(tmp_path / "run")], check=True)
        assert {path.name for path in published(tmp_path / "run")} == left, call


@procfs
def test_a5_the_writer_is_killed_in_a_run(trainer, holds, writer, tmp_path: Path) -> None:
    """Told before another step is over, tried again at the next interval; the last save has to succeed."""
    told: list[Event] = []

    def watch(event: Event) -> None:
        told.append(event)
        if (event["kind"], event.get("step")) == ("step", 14):
            threading.Timer(0.3, writer, [signal.SIGKILL]).start()
        if (event["kind"], event.get("step")) in (("step", 3), ("step", 14)):
            writer(signal.SIGSTOP)
        if (event["kind"], event.get("step")) == ("step", 4):
            writer(signal.SIGKILL)

    with pytest.raises(
        UserError, match=r"last checkpoint could not be written.*signal 9.*same command again"
    ):
        trainer.watched(tmp_path / "run", watch, patient=[14])
    kinds = [(event["kind"], event.get("step")) for event in told]
    at_once = told[kinds.index(("step", 4)) : kinds.index(("step", 5))]
    lost = "the checkpoint of step 3 was NOT written: the process that wrote it ended"
    assert any(event.get("said", "").startswith(lost) for event in at_once)
    saved = [step for kind, step in kinds if kind == "checkpoint"]
    assert saved
    assert set(saved) <= {6, 9, 12}
    assert holds(tmp_path / "run").name == f"checkpoint-{saved[-1]}"
    assert trainer.train(tmp_path / "run", "checkpoint.wait=false").code == 0
    assert holds(tmp_path / "run").name == "checkpoint-14"


@procfs
def test_a6_a_writer_that_hangs(trainer, holds, writer, warned, tmp_path: Path) -> None:
    """Saves are left out and counted, never queued: there is one copy, whatever is waiting."""
    copies: dict[int, set[tuple[int, int]]] = {}

    def watch(event: Event) -> None:
        if event["kind"] == "step":
            copies[event["step"]] = memory()
        if (event["kind"], event.get("step")) == ("step", 3):
            writer(signal.SIGSTOP)
        if (event["kind"], event.get("step")) == ("step", 14):
            writer(signal.SIGCONT)

    assert trainer.watched(tmp_path / "run", watch).done
    assert re.findall(r"no checkpoint at step (\d+).*\((\d) left out so far\)", warned(tmp_path / "run")) == [
        ("6", "1"),
        ("9", "2"),
        ("12", "3"),
    ]
    assert len(copies[3]) == 1
    assert all(copies[step] == copies[3] for step in range(3, 15))
    assert [path.name for path in published(tmp_path / "run")] == ["checkpoint-14", "checkpoint-3"]
    holds(tmp_path / "run")


def memory() -> set[tuple[int, int]]:
    """Each copy of a state that this process holds, and its bytes."""
    copies: set[tuple[int, int]] = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the list itself is closed by now
            if "memfd:checkpoint-data" in os.readlink(f"/proc/self/fd/{descriptor}"):
                said = os.fstat(int(descriptor))
                copies.add((said.st_ino, said.st_size))
    return copies


@procfs
@pytest.mark.parametrize("error", [RuntimeError, SystemExit, KeyboardInterrupt])
def test_a8_an_error_while_a_save_is_under_way(error, trainer, holds, writer, tmp_path: Path) -> None:
    """The error stays the error; the save is waited for."""

    def watch(event: Event) -> None:
        if (event["kind"], event.get("step")) == ("step", 3):
            writer(signal.SIGSTOP)
        if (event["kind"], event.get("step")) == ("step", 5):
            threading.Timer(0.2, writer, [signal.SIGCONT]).start()
            raise error("of the test")

    with pytest.raises(error, match="of the test"):
        trainer.watched(tmp_path / "run", watch)
    assert holds(tmp_path / "run").name == "checkpoint-3"


@procfs
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a9_a_second_signal_while_the_last_save_is_written(
    number: signal.Signals, trainer, holds, stopped_writer, warm, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = ["train.steps=100000", "precision.compile=off", "checkpoint.every=50000", "checkpoint.wait=false"]
    process = warm(*trainer.words(run, *words))
    writer = stopped_writer(process, run)
    process.send_signal(number)
    while not told(writer):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    time.sleep(0.05)
    process.send_signal(number)
    time.sleep(0.2)
    os.kill(writer, signal.SIGCONT)
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 75, errors
    assert "run the same command again" in said + errors
    steps = re.findall(r'"kind": "step", "attempt": 1, "step": (\d+)', (run / "events.jsonl").read_text())
    assert holds(run).name == f"checkpoint-{steps[-1]}"
    assert not Path(f"/proc/{writer}").exists()


def told(writer: int) -> int:
    """The bytes that a stopped writer has been told and has not read yet: a save is under way."""
    waiting = array.array("i", [0])
    with Path(f"/proc/{writer}/fd/0").open("rb", buffering=0) as pipe:
        fcntl.ioctl(pipe, termios.FIONREAD, waiting)
    return waiting[0]


@traced
def test_a10_a_sync_that_fails(tmp_path: Path) -> None:
    """EIO at each of them: told, cleaned up, and the next save begins anew."""
    run = tmp_path / "run"
    syncs = [call for call in points.count(saver.in_place, run).calls if call.name == "fsync"]
    assert len(syncs) >= 7  # three files, the directory, its parents, the pointer
    for call in syncs:
        observed = points.fail(saver.in_place, run, call)
        assert not observed.verdict.faults, observed
