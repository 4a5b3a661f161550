"""A checkpoint that somebody reads stays, whoever that is; and the hold ends with its holder."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from glm_accelerate.checkpoint.format import FOLDER, Damaged, Manifest
from glm_accelerate.checkpoint.lease import is_leased, lease, sole
from glm_accelerate.checkpoint.retain import Entry, delete
from tests.checkpoints import keeping, tidy, write_manifest

HOLD = """
import sys
from pathlib import Path
from glm_accelerate.checkpoint.lease import lease
with lease(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def make(run: Path, step: int) -> Path:
    path = run / FOLDER / f"checkpoint-{step}"
    path.mkdir(parents=True)
    write_manifest(path, Manifest(step, 1, {}, {}, run="mine"))
    return path


@contextmanager
def holder(path: Path) -> Generator[subprocess.Popen[str]]:
    """Another process that holds it."""
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


@pytest.mark.process
def test_a_leased_one_stays_until_its_holder_is_killed(tmp_path: Path) -> None:
    first, _ = make(tmp_path, 1), make(tmp_path, 2)
    with holder(first) as process:
        assert is_leased(first)
        assert delete(tmp_path, [Entry(1, 0.0)]).deleted == ()  # also when the choice came before the lease
        assert tidy(tmp_path, keeping(last=1, best=0), run_id="mine", losses={}).deleted == ()
        assert first.is_dir()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not is_leased(first)
        done = tidy(tmp_path, keeping(last=1, best=0), run_id="mine", losses={})
        assert (done.deleted, done.failed) == ((1,), {})
    assert sorted(os.listdir(tmp_path / FOLDER)) == ["checkpoint-2"]


@pytest.mark.process
def test_a_stopped_holder_still_holds(tmp_path: Path) -> None:
    path = make(tmp_path, 1)
    with holder(path) as process:
        process.send_signal(signal.SIGSTOP)
        assert is_leased(path)
        assert delete(tmp_path, [Entry(1, 0.0)]).deleted == ()


def test_many_hold_at_once_and_none_is_left(tmp_path: Path) -> None:
    path = make(tmp_path, 1)
    with lease(path) as one, lease(path) as other:
        assert one == other == path
        assert is_leased(path)
        with sole(path) as free:
            assert not free
    assert not is_leased(path)
    with sole(path) as free:
        assert free


def test_it_writes_nothing(tmp_path: Path) -> None:
    path = make(tmp_path, 1)
    for entry in (*path.iterdir(), path):
        entry.chmod(0o500 if entry.is_dir() else 0o400)
    before = {entry.name: entry.stat().st_mtime_ns for entry in path.iterdir()}
    with lease(path):
        assert is_leased(path)
    assert {entry.name: entry.stat().st_mtime_ns for entry in path.iterdir()} == before
    path.chmod(0o700)


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="sees in /proc/locks that it waits")
def test_what_is_being_deleted_is_not_held(
    tmp_path: Path, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    """The lease comes too late: it waits for the deletion, and then says what happened."""
    path = make(tmp_path, 1)
    command = [sys.executable, "-c", HOLD, str(path)]
    with sole(path) as free:
        assert free
        late = spawn(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while not re.search(rf"-> FLOCK .* {late.pid} ", Path("/proc/locks").read_text()):
            assert late.poll() is None
            time.sleep(0.01)
        path.rename(path.with_name(".trash"))
    assert "was deleted while it was being opened" in late.communicate(timeout=20)[1]


def test_nothing_to_hold(tmp_path: Path) -> None:
    assert not is_leased(tmp_path / "none")
    with pytest.raises(Damaged, match="not a whole checkpoint"), lease(tmp_path / "none"):
        pass
