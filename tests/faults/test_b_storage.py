"""B. Storage that is full, damaged, read-only or oddly named. See README.md for the other cases."""

import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest

from glm_accelerate.checkpoint.audit import audit, compare
from glm_accelerate.checkpoint.find import candidates, published
from tests.checkpoints import keeping, tidy

SHARD = "weights-0-of-1.safetensors"
Event = dict[str, Any]


def test_b1_the_disk_is_full_in_the_midst_of_a_save(
    trainer, holds, refused, warned, mount, tmp_path: Path
) -> None:
    """No file can be made any more: each save that fails is told and leaves nothing, training goes on, and
    the run does not end well. With room again the same command does the rest.
    """
    disk = mount(tmp_path / "disk", "-t", "tmpfs", "-o", "size=64m,nr_inodes=26", "tmpfs")
    words = ["checkpoint.keep_last=50"]
    said = trainer.train(disk / "run", *words)
    refused(said, "the last checkpoint could not be written", "No space left", "the same command again")
    left = published(disk / "run")
    assert 1 <= len(left) < 4
    assert not any(audit(path).damaged for path in left)
    assert not list((disk / "run" / "checkpoints").glob(".checkpoint-*"))
    assert "was NOT written" in warned(disk / "run")
    assert "training goes on" in warned(disk / "run")
    assert holds(disk / "run") == left[0]
    bigger = tmp_path / "bigger"
    shutil.copytree(disk / "run", bigger)
    assert trainer.train(bigger, *words).code == 0
    assert holds(bigger).name == "checkpoint-14"


def test_b2_no_room_for_one_more(trainer, holds, warned, mount, tmp_path: Path) -> None:
    """Said before anything is written, with what is needed and what is there; later there is room again."""
    disk = mount(tmp_path / "disk", "-t", "tmpfs", "-o", "size=4m", "tmpfs")
    ballast = disk / "ballast"

    def watch(event: Event) -> None:
        if (event["kind"], event.get("step")) == ("step", 2):
            ballast.write_bytes(bytes(3 << 20))
        if (event["kind"], event.get("step")) == ("step", 13):
            ballast.unlink()

    assert trainer.watched(disk / "run", watch, patient=range(15)).done
    assert "the checkpoint of step 3 was NOT written: no room: needs 1,1" in warned(disk / "run")
    assert [path.name for path in published(disk / "run")] == ["checkpoint-14"]
    holds(disk / "run")


def test_b3_a_limit_on_the_size_of_files(trainer, holds, writer_limit, warned, tmp_path: Path) -> None:
    """As a quota: the save under it fails by name, the one after it works."""
    hard = resource.RLIM_INFINITY

    def watch(event: Event) -> None:
        if (event["kind"], event.get("step")) == ("step", 3):
            writer_limit(8192)
        if (event["kind"], event.get("step")) == ("step", 13):
            writer_limit(hard)

    assert trainer.watched(tmp_path / "run", watch, patient=range(15)).done
    assert "the checkpoint of step 3 was NOT written: cannot be written: [Errno 27]" in warned(
        tmp_path / "run"
    )
    assert holds(tmp_path / "run").name == "checkpoint-14"


def test_b4_truncated_shard_at_every_eighth(trainer, refused, warned, run: Path) -> None:
    """An explicit path is refused with the file and both sizes; auto takes the one before."""
    newest = run / "checkpoints" / "checkpoint-14"
    size = (newest / SHARD).stat().st_size
    for eighth in reversed(range(8)):
        os.truncate(newest / SHARD, size * eighth // 8)
        said = trainer.train(run, "--resume", str(newest))
        refused(said, f"{SHARD} is {size * eighth // 8} bytes, should be {size} bytes", str(newest))
    assert trainer.train(run).code == 0
    assert f"passed over: {newest}: {SHARD} is 0 bytes" in warned(run)
    assert (run / "abandoned" / newest.name).is_dir()


def test_b7_an_unknown_file_is_no_harm(trainer, holds, run: Path) -> None:
    (run / "checkpoints" / "checkpoint-14" / "notes.txt").write_text("mine")
    assert trainer.train(run).code == 0
    assert holds(run).name == "checkpoint-14"
    assert audit(run / "checkpoints" / "checkpoint-14").strange == ("notes.txt",)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("file", "File exists"),
        ("below a file", "Not a directory"),
        ("dangling link", "File exists"),
        ("link to itself", "File exists"),
        ("checkpoints is a file", "File exists"),
        ("checkpoints is a dangling link", "File exists"),
        ("lock is a directory", "Is a directory"),
    ],
)
def test_b9_an_output_that_is_no_directory(kind: str, reason: str, trainer, refused, tmp_path: Path) -> None:
    run = place = tmp_path / "run"
    if kind in ("file", "below a file"):
        run.write_text("a file")
        place = run = run / "deeper" if kind == "below a file" else run
    elif "link" in kind and "checkpoints" not in kind:
        run.symlink_to("run" if "itself" in kind else "nowhere")
    else:
        run.mkdir()
        place = run / kind.split()[0]
        if kind == "checkpoints is a file":
            place.write_text("a file")
        elif kind == "lock is a directory":
            place.mkdir()
        else:
            place.symlink_to("nowhere")
    said = trainer.train(run)
    refused(said, f"{place}", reason, "--run")
    assert said.out == ""  # nothing was loaded, planned or proved


def test_b9_an_output_that_cannot_be_written(trainer, refused, frozen, run: Path) -> None:
    """Neither the directory, nor its checkpoints, nor a file that grows."""
    for place in (run, run / "checkpoints", run / "events.jsonl"):
        with frozen(place):
            said = trainer.train(run)
        refused(said, str(place), "Operation not permitted", "--run")
        assert said.out == ""
    assert not list(run.glob("tmp*"))


def test_b9_a_file_system_that_is_read_only(trainer, refused, mount, tmp_path: Path) -> None:
    disk = mount(tmp_path / "disk", "-t", "tmpfs", "-o", "ro", "tmpfs")
    for run in (disk, disk / "run"):
        refused(trainer.train(run), f"{run}/checkpoints: no run can be kept here: Read-only file system")


def test_b10_from_a_read_only_archive(trainer, holds, shell, mount, run: Path, tmp_path: Path) -> None:
    """A run goes on elsewhere; the archive can be listed and verified; nothing is written beside it."""
    archive = mount(tmp_path / "archive", "--bind", str(run))
    mount(archive, "-o", "remount,ro,bind")
    before = {path: path.stat().st_mtime_ns for path in archive.rglob("*")}
    said = trainer.train(tmp_path / "new", "--resume", str(archive / "checkpoints" / "checkpoint-12"))
    assert said.code == 0, said
    assert "going on after step 12" in said.out
    assert holds(tmp_path / "new").name == "checkpoint-14"
    differences = list(compare(holds(tmp_path / "new"), archive / "checkpoints" / "checkpoint-14"))
    assert differences == []
    for action in ("list", "verify", "prune"):
        assert shell("checkpoints", str(archive), action).code == 0
    assert {path: path.stat().st_mtime_ns for path in archive.rglob("*")} == before


@pytest.mark.parametrize(
    "name", ["two  spaces", "天空 é", os.fsdecode(b"caf\xe9\xff"), "a\nb", "$(x) '\"*[red]", "d" * 200]
)
def test_b11_names_of_all_kinds(name: str, trainer, holds, shell, tmp_path: Path) -> None:
    run = tmp_path / name
    try:
        run.mkdir()
    except OSError as error:
        pytest.skip(f"this file system has no such names: {error}")
    assert trainer.train(run, "train.steps=4").code == 0
    assert trainer.train(run, "train.steps=7", "--accept", "schedule").code == 0
    assert holds(run).name == "checkpoint-7"
    for action in ("list", "verify"):
        assert shell("checkpoints", str(run), action).code == 0


def test_b11_names_that_are_too_long(trainer, refused, shell, tmp_path: Path) -> None:
    for run in (tmp_path / ("x" * 300), tmp_path / "/".join(["d" * 200] * 30)):
        refused(trainer.train(run), str(run), "File name too long")
        refused(shell("checkpoints", str(run)), str(run), "File name too long")
        refused(trainer.train(tmp_path / "run", "--resume", str(run)), str(run), "File name too long")


def test_b12_checkpoints_on_a_disk_of_their_own(
    trainer, holds, mount, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No rename crosses file systems, wherever temporary files go; what is given up is copied aside."""
    monkeypatch.setenv("TMPDIR", str(mount(tmp_path / "tmp", "-t", "tmpfs", "-o", "size=1m", "tmpfs")))
    run = tmp_path / "run"
    mount(run / "checkpoints", "-t", "tmpfs", "-o", "size=16m", "tmpfs")
    assert trainer.train(run).code == 0
    assert trainer.train(run, "--resume", "9").code == 0
    assert holds(run).name == "checkpoint-14"
    assert sorted(path.name for path in (run / "abandoned").iterdir()) == ["checkpoint-12", "checkpoint-14"]
    for path in (run / "abandoned").iterdir():
        assert not audit(path).damaged
        assert list(compare(path, run / "checkpoints" / path.name)) == []  # done again to the last bit


def test_b13_no_date_is_believed(run: Path) -> None:
    for number, path in enumerate(sorted((run / "checkpoints").glob("checkpoint-*/*"))):
        os.utime(path, (1e9 - 1000 * number, 0))
    for path in (run / "checkpoints").glob("checkpoint-*"):
        os.utime(path, (0, 0))
    assert [path.name for path in candidates(run).paths] == ["checkpoint-14", "checkpoint-12", "checkpoint-9"]
    assert tidy(run, keeping(last=1, best=0), run_id=None, losses={}).deleted == (9, 12)


def test_b14_a_run_that_was_moved(trainer, holds, shell, run: Path, tmp_path: Path) -> None:
    """Whole, or only one of its checkpoints."""
    elsewhere = tmp_path / "another" / "place"
    elsewhere.parent.mkdir()
    run.rename(elsewhere)
    assert shell("checkpoints", str(elsewhere), "verify").code == 0
    assert trainer.train(elsewhere, "--resume", "9").code == 0
    assert holds(elsewhere).name == "checkpoint-14"
    alone = Path(shutil.copytree(elsewhere / "checkpoints" / "checkpoint-9", tmp_path / "alone"))
    shutil.rmtree(elsewhere)
    said = trainer.train(tmp_path / "run", "--resume", str(alone))
    assert said.code == 0, said
    assert holds(tmp_path / "run").name == "checkpoint-14"
