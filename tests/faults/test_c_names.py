"""C. Names, the pointer, and others who use the same directory. See README.md for the other cases."""

import os
import re
import shutil
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from glm_accelerate.checkpoint.audit import compare
from glm_accelerate.checkpoint.find import published
from glm_accelerate.training.lock import only_trainer

HOLD = """
import sys
from pathlib import Path
from glm_accelerate.training.lock import only_trainer
with only_trainer(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
# Root without its privileges is an ordinary owner of its files; anybody else is one anyway.
ORDINARY = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()


def test_c4_an_explicit_path_where_nothing_may_be_listed(trainer, holds, run: Path, tmp_path: Path) -> None:
    """The directory above the checkpoint may be passed through and not read: the run goes on."""
    if ORDINARY and shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed, and root may list everything")
    folder = run / "checkpoints"
    folder.chmod(0o311)
    try:
        listed = subprocess.run([*ORDINARY, "ls", str(folder)], capture_output=True, check=False)
        if listed.returncode == 0:
            pytest.skip("this user may list everything")
        line = [*ORDINARY, sys.executable, "-m", "glm_accelerate.cli.main"]
        line += trainer.words(tmp_path / "new", "--resume", str(folder / "checkpoint-12"))
        done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    finally:
        folder.chmod(0o700)
    assert done.returncode == 0, done.stderr
    assert "going on after step 12" in done.stdout
    assert list(compare(holds(tmp_path / "new"), folder / "checkpoint-14")) == []


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("missing", "names checkpoint-99; checkpoint-14 is the newest that is whole"),
        ("incomplete", "names checkpoint-15; checkpoint-14 is the newest that is whole"),
        ("outside", "does not hold a checkpoint's name"),
        ("empty", "does not hold a checkpoint's name"),
        ("binary", "does not hold a checkpoint's name"),
        ("directory", "cannot be read (Is a directory)"),
        ("link", "cannot be read (Too many levels of symbolic links)"),
    ],
)
def test_c5_a_pointer_that_leads_astray(
    kind: str, reason: str, trainer, holds, shell, warned, run: Path, tmp_path: Path
) -> None:
    """The newest whole checkpoint is taken, and why; nothing outside the run is looked at."""
    trap = tmp_path / "outside" / "checkpoint-99"
    shutil.copytree(run / "checkpoints" / "checkpoint-14", trap)
    (run / "checkpoints" / "checkpoint-15").mkdir()
    pointer = run / "checkpoints" / "latest"
    pointer.unlink()
    if kind == "directory":
        pointer.mkdir()
    elif kind == "link":
        pointer.symlink_to(trap)
    else:
        relative = b"../../outside/checkpoint-99\n"
        says = {"missing": b"checkpoint-99\n", "incomplete": b"checkpoint-15\n", "outside": relative}
        pointer.write_bytes({**says, "empty": b"", "binary": bytes(range(256))}[kind])
    assert f"{pointer}: {reason}" in shell("checkpoints", str(run)).out
    said = trainer.train(run)
    assert said.code == 0, said
    assert "going on after step 14 of 14" in said.out
    assert f"{pointer}: {reason}" in warned(run)
    assert holds(run).name == "checkpoint-14"


def test_c8_a_name_that_says_another_step(trainer, holds, refused, warned, run: Path) -> None:
    renamed = run / "checkpoints" / "checkpoint-30"
    (run / "checkpoints" / "checkpoint-14").rename(renamed)
    for named in ("30", str(renamed)):
        refused(trainer.train(run, "--resume", named), "the name says step 30, the manifest says 14")
    assert trainer.train(run).code == 0
    assert "passed over: " in warned(run)
    assert "the name says step 30, the manifest says 14" in warned(run)
    assert holds(run).name == "checkpoint-14"
    assert (run / "abandoned" / "checkpoint-30").is_dir()


def test_c9_a_second_trainer_is_told_who_is_there(trainer, holds, refused, run: Path, spawn) -> None:
    """Process, host and since when; it changes nothing. The first, killed, leaves no hindrance."""
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*") if path.name != "lock")
    pipe = subprocess.PIPE
    first = spawn([sys.executable, "-c", HOLD, str(run)], stdin=pipe, stdout=pipe)
    assert first.stdout is not None
    assert first.stdout.readline() == b"held\n"
    said = trainer.train(run)
    refused(said, f"process {first.pid} on {socket.gethostname()}, since ", "is training here", "--run")
    since = re.search(r"since (\S+ \S+) UTC", said.err)
    assert since is not None
    age = datetime.now(UTC) - datetime.fromisoformat(f"{since[1]}+00:00")
    assert timedelta(seconds=-1) < age < timedelta(minutes=1)
    assert before == sorted((p, p.stat().st_mtime_ns) for p in run.rglob("*") if p.name != "lock")
    first.kill()
    first.wait()
    assert trainer.train(run).code == 0
    holds(run)


def test_c9_all_ranks_of_a_second_trainer_end(trainer, warm, run: Path) -> None:
    """The first rank finds the lock held; the others hear of it, and it is said once."""
    with only_trainer(run):
        second = warm(*trainer.words(run, "--nproc", "2")).done()
    assert second.returncode == 2, second.stderr
    assert second.stderr.count("is training here") == 1
    assert f"process {os.getpid()} on {socket.gethostname()}, since " in second.stderr


def test_c10_a_lock_of_another_host_that_is_gone(trainer, holds, run: Path) -> None:
    """After a reboot, or on a copied directory: what the file says binds nobody, only a live holder does."""
    (run / "lock").write_text("process 1 on another-host, since 2020-01-01 00:00:00 UTC,")
    assert trainer.train(run).code == 0
    holds(run)


def test_c11_a_new_run_over_an_old_one(trainer, holds, refused, run: Path) -> None:
    """Other settings are refused until said twice; `never` moves the old checkpoints aside, deleting none."""
    other = ["train.seed=5", "train.steps=7"]
    refused(trainer.train(run, *other), "the config of this run has changed: ", "--run DIR for a new run")
    assert trainer.train(run, *other, "--accept-changes", "--resume", "never").code == 0
    assert holds(run).name == "checkpoint-7"
    gone = sorted(path.name for path in (run / "abandoned").iterdir())
    assert gone == ["checkpoint-12", "checkpoint-14", "checkpoint-9"]


def test_c13_a_checkpoint_that_cannot_be_deleted(trainer, holds, frozen, warned, tmp_path: Path) -> None:
    """Warned of at each save, and training goes on."""
    run = tmp_path / "run"
    assert trainer.train(run, "train.steps=4").code == 0
    with frozen(run / "checkpoints" / "checkpoint-3"):
        words = ["checkpoint.keep_last=1", "--accept", "schedule", "--accept", "config"]
        assert trainer.train(run, *words).code == 0
    assert "the checkpoint of step 3 could not be deleted: " in warned(run)
    assert "Operation not permitted" in warned(run)
    assert [path.name for path in published(run)] == ["checkpoint-14", "checkpoint-3"]
    holds(run)
