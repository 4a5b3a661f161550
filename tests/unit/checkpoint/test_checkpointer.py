"""Saves behind the training: what is written is what was given, and a bad day of the writer is told."""

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import torch

from glm_accelerate.checkpoint.checkpointer import Checkpointer, Save, SaveOutcome
from glm_accelerate.checkpoint.format import read_manifest
from glm_accelerate.checkpoint.meeting import Patience
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.checkpoint.staging import Pieces
from glm_accelerate.parallel.part import Part, part_of
from tests.checkpoints import verify

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the writer in /proc")


@pytest.fixture
def checkpointer(tmp_path: Path) -> Generator[Checkpointer]:
    made = Checkpointer(tmp_path, run_id="f00d")
    yield made
    made.close(0)


def state(kilobytes: int = 40, seed: int = 0) -> Pieces:
    draw = torch.Generator().manual_seed(seed)
    matrix = torch.randn(kilobytes * 2, 64, generator=draw)
    return {
        "weights": {"w": part_of(matrix), "b": part_of(matrix[0].bfloat16())},
        "optimizer": {"w::m": part_of(matrix * 2), "w::step": part_of(torch.tensor(3.0))},
    }


def save(step: int, groups: Pieces) -> Save:
    return Save(step, 1, groups, {"position": step}, {"data": "d"}, {"template": "glm4"})


def ended(checkpointer: Checkpointer, seconds: float = 100) -> SaveOutcome:
    until = time.monotonic() + seconds
    while checkpointer.busy():
        assert time.monotonic() < until
        time.sleep(0.005)
    (outcome,) = checkpointer.outcomes()
    return outcome


def writers() -> list[int]:
    """The writer processes among the children of this one."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(child) for child in children if b"checkpoint.writer" in words_of(child)]


def words_of(process: str) -> bytes:
    """Its command line, which one that was just made gets in a moment; nothing where it has just ended."""
    words = b""
    while not words and alive(int(process)):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{process}/cmdline").read_bytes()
    return words


def content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def there(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_behind_and_in_place_are_the_same_bytes(tmp_path: Path) -> None:
    groups = state()
    staged, plain = Checkpointer(tmp_path / "staged", run_id="f00d"), Checkpointer(tmp_path, run_id="f00d")
    (tmp_path / "staged").mkdir()
    staged.stage(groups)
    for step in (1, 2):
        blocked = staged.save(save(step, groups))
        assert plain.save(save(step, groups)) > 0
        outcome = ended(staged)
        (other,) = plain.outcomes()
        assert outcome.error is other.error is None
        assert outcome.path is not None
        assert other.path is not None
        assert outcome.blocked_seconds == blocked <= outcome.total_seconds
        assert content(outcome.path) == content(other.path)
        assert outcome.bytes == other.bytes == sum(entry.bytes for entry in verify(other.path).files.values())
    assert read_manifest(other.path).run == "f00d"
    assert staged.close(5) == []
    assert writers() == []


def test_compressed_behind_and_in_place_are_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    groups = state(400)
    staged, plain = (Checkpointer(tmp_path / name, codec="zstd") for name in ("staged", "plain"))
    (tmp_path / "staged").mkdir()
    staged.stage(groups)
    for checkpointer in (staged, plain):
        checkpointer.save(save(1, groups), wait=True)
    ((one,), (other,)) = staged.close(1), plain.close(1)
    assert one.path is not None
    assert other.path is not None
    assert content(one.path) == content(other.path)
    reader = Reader(one.path)
    for group, pieces in groups.items():
        for name, piece in pieces.items():
            assert torch.equal(reader.tensor(group, name), piece.local)
    wanted = groups["weights"]["w"].local[5:700, 3:9]
    assert torch.equal(reader.tensor("weights", "w", (5, 3), (695, 6)), wanted)


def test_what_changes_after_save_is_not_in_it(checkpointer: Checkpointer) -> None:
    groups = state(4000)
    before = {name: piece.local.clone() for name, piece in groups["weights"].items()}
    checkpointer.stage(groups)
    for step in (1, 2):
        checkpointer.save(save(step, groups))
        for piece in groups["weights"].values():
            piece.local.add_(1)
        path = ended(checkpointer).path
        assert path is not None
        for name, tensor in Reader(path).group("weights").items():
            assert torch.equal(tensor, before[name])
        before = {name: piece.local.clone() for name, piece in groups["weights"].items()}


def test_one_save_at_a_time(checkpointer: Checkpointer) -> None:
    checkpointer.stage(groups := state())
    os.kill(writers()[0], signal.SIGSTOP)
    checkpointer.save(save(1, groups))
    assert checkpointer.busy()
    assert checkpointer.outcomes() == []
    with pytest.raises(AssertionError, match="one save at a time"):
        checkpointer.save(save(2, groups))
    os.kill(writers()[0], signal.SIGCONT)
    assert ended(checkpointer).step == 1


def test_saving_never_waits_for_a_writer_that_hangs(checkpointer: Checkpointer) -> None:
    """However much there is to tell it."""
    checkpointer.stage(groups := state())
    os.kill(writers()[0], signal.SIGSTOP)
    long = {str(number): "x" * 100 for number in range(20_000)}
    assert checkpointer.save(Save(1, 1, groups, long, {}, {})) < 5
    os.kill(writers()[0], signal.SIGCONT)
    path = ended(checkpointer).path
    assert path is not None
    assert Reader(path).state() == long


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.06])
def test_a_killed_writer_is_told_and_replaced(
    delay: float, checkpointer: Checkpointer, tmp_path: Path
) -> None:
    """It is stopped on its way, so that the kill finds it there."""
    checkpointer.stage(groups := state(60_000))
    checkpointer.save(save(1, groups), wait=True)
    (outcome,) = checkpointer.outcomes()
    assert outcome.error is None
    checkpointer.save(save(2, groups))
    time.sleep(delay)
    (writer,) = writers()
    os.kill(writer, signal.SIGSTOP)
    os.kill(writer, signal.SIGKILL)
    outcome = ended(checkpointer)
    assert (outcome.step, outcome.path, outcome.bytes) == (2, None, 0)
    assert outcome.error == "the process that wrote it ended (signal 9)"
    assert there(tmp_path) == ["checkpoint-1", "latest"]
    verify(tmp_path / "checkpoints" / "checkpoint-1")
    checkpointer.save(save(2, groups), wait=True)
    assert [made.error for made in checkpointer.outcomes()] == [None]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "checkpoint-2\n"


def test_a_writer_that_died_in_its_sleep_is_replaced(checkpointer: Checkpointer) -> None:
    checkpointer.stage(groups := state())
    os.kill(writers()[0], signal.SIGKILL)
    time.sleep(0.1)
    checkpointer.save(save(1, groups), wait=True)
    (outcome,) = checkpointer.outcomes()
    if outcome.error is not None:  # the pipe was still open when it was told
        checkpointer.save(save(1, groups), wait=True)
        (outcome,) = checkpointer.outcomes()
    assert outcome.error is None


def test_a_hung_writer_is_ended_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm_accelerate.checkpoint.checkpointer.GRACE", 0.1)
    checkpointer = Checkpointer(tmp_path, limit=0.5)
    checkpointer.stage(groups := state())
    (writer,) = writers()
    os.kill(writer, signal.SIGSTOP)
    checkpointer.save(save(1, groups))
    began = time.monotonic()
    assert ended(checkpointer).error == "nothing more was written for 0.5 s"
    assert 0.3 < time.monotonic() - began < 5
    assert writers() == []
    monkeypatch.setattr("glm_accelerate.checkpoint.checkpointer.GRACE", 30.0)  # the next one is slow, at most
    checkpointer.save(save(2, groups), wait=True)
    assert [made.error for made in checkpointer.close(1)] == [None]


def test_a_slow_writer_that_advances_is_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped whenever it has written something: all in all for longer than the limit."""
    monkeypatch.setattr("glm_accelerate.checkpoint.checkpointer.GRACE", 0.0)
    limit, stops = 5.0, 4
    checkpointer = Checkpointer(tmp_path, limit=limit)
    checkpointer.stage(groups := state(kilobytes=64 << 10))  # some blocks
    (writer,) = writers()
    checkpointer.save(save(1, groups))
    began, before, directory = time.monotonic(), 0, tmp_path / "checkpoints" / ".checkpoint-1.1"
    for _ in range(stops):
        while (grown := sum(file.stat().st_size for file in directory.glob("*"))) == before:
            assert checkpointer.busy()
        before = grown
        os.kill(writer, signal.SIGSTOP)
        held = time.monotonic()
        while time.monotonic() < held + 0.3 * limit:
            assert checkpointer.busy()
            time.sleep(0.05)
        os.kill(writer, signal.SIGCONT)
    assert [made.error for made in checkpointer.close()] == [None]
    assert time.monotonic() - began > limit


@pytest.mark.parametrize("move", [Path.touch, lambda path: path.write_bytes(path.read_bytes() + b"x")])
def test_patience_lasts_as_long_as_a_file_moves(tmp_path: Path, move: Callable[[Path], object]) -> None:
    limit = 1.0
    patience, file = Patience(tmp_path, limit), tmp_path / "weights"
    file.touch()
    began = time.monotonic()
    while time.monotonic() < began + 1.5 * limit:
        move(file)
        assert not patience.over()
        time.sleep(0.02)
    while not patience.over():
        assert time.monotonic() < began + 20 * limit
        time.sleep(0.1)


def test_a_full_disk_keeps_the_old_and_goes_on(checkpointer: Checkpointer, tmp_path: Path) -> None:
    """A limit on the size of the writer's files stands for it."""
    checkpointer.stage(groups := state())
    checkpointer.save(save(1, groups), wait=True)
    (writer,) = writers()
    _, hard = resource.prlimit(writer, resource.RLIMIT_FSIZE)
    resource.prlimit(writer, resource.RLIMIT_FSIZE, (8192, hard))
    checkpointer.save(save(2, groups), wait=True)
    first, second = checkpointer.outcomes()
    assert first.error is None
    assert second.error is not None
    assert "cannot be written" in second.error
    assert "File too large" in second.error
    assert there(tmp_path) == ["checkpoint-1", "latest"]
    resource.prlimit(writer, resource.RLIMIT_FSIZE, (hard, hard))
    checkpointer.save(save(3, groups), wait=True)
    assert [made.error for made in checkpointer.outcomes()] == [None]


@pytest.mark.parametrize("staged", [True, False])
def test_a_place_that_cannot_be_written_is_told(
    staged: bool, checkpointer: Checkpointer, tmp_path: Path
) -> None:
    groups = state()
    if staged:
        checkpointer.stage(groups)
    (tmp_path / "checkpoints").write_text("a file")
    checkpointer.save(save(1, groups), wait=True)
    (outcome,) = checkpointer.outcomes()
    assert outcome.path is None
    assert outcome.error is not None
    assert "cannot be written" in outcome.error


def test_no_room_is_said_before_anything_is_written(
    checkpointer: Checkpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer.save(save(1, state()))
    monkeypatch.setattr("glm_accelerate.checkpoint.write.MARGIN", 1 << 60)
    checkpointer.save(save(2, state()))
    first, second = checkpointer.outcomes()
    assert first.error is None
    assert second.error is not None
    assert second.error.startswith("no room: needs 1,152,921,504,6")
    assert there(tmp_path) == ["checkpoint-1", "latest"]


def test_what_is_published_is_never_written_again(checkpointer: Checkpointer, tmp_path: Path) -> None:
    checkpointer.save(save(1, state()))
    before = content(tmp_path / "checkpoints" / "checkpoint-1")
    checkpointer.save(save(1, state(seed=1)))
    _, second = checkpointer.outcomes()
    assert second.error == "it is published already, and is never written again"
    assert content(tmp_path / "checkpoints" / "checkpoint-1") == before


def test_the_end_waits_so_long_and_not_longer(tmp_path: Path) -> None:
    groups = state()
    patient, hasty = Checkpointer(tmp_path), Checkpointer(tmp_path)
    patient.stage(groups)
    patient.save(save(1, groups))
    assert [(outcome.step, outcome.error) for outcome in patient.close(20)] == [(1, None)]
    hasty.stage(groups)
    (writer,) = writers()
    os.kill(writer, signal.SIGSTOP)
    hasty.save(save(2, groups))
    began = time.monotonic()
    (outcome,) = hasty.close(0.2)
    assert outcome.error == "not written 0.2 s after the end"
    assert time.monotonic() - began < 4
    assert writers() == []
    assert there(tmp_path) == ["checkpoint-1", "latest"]


def test_signals_to_the_group_leave_the_writer_alone(checkpointer: Checkpointer) -> None:
    checkpointer.stage(groups := state())
    checkpointer.save(save(1, groups), wait=True)
    (writer,) = writers()
    assert os.getpgid(writer) == writer
    os.kill(writer, signal.SIGTERM)
    os.kill(writer, signal.SIGINT)
    checkpointer.save(save(2, groups), wait=True)
    assert [outcome.error for outcome in checkpointer.outcomes()] == [None, None]
    assert writers() == [writer]


def test_other_tensors_than_staged_are_saved_too(checkpointer: Checkpointer) -> None:
    """An optimizer that has no moments yet, for one."""
    full = state()
    checkpointer.stage({"weights": full["weights"], "optimizer": {}})
    checkpointer.save(save(1, full), wait=True)
    (outcome,) = checkpointer.outcomes()
    assert outcome.path is not None
    moments = Reader(outcome.path).group("optimizer")
    assert torch.equal(moments["w::m"], full["optimizer"]["w::m"].local)


def test_what_does_not_exist_yet_can_be_staged(checkpointer: Checkpointer) -> None:
    """By its shape alone, so that the first save finds its memory made."""
    full = state()
    shapes = {
        group: {
            name: Part(torch.empty_like(piece.local, device="meta"), piece.shape, piece.offset)
            for name, piece in pieces.items()
        }
        for group, pieces in full.items()
    }
    checkpointer.stage(shapes)
    before = writers()
    checkpointer.save(save(1, full), wait=True)
    (outcome,) = checkpointer.outcomes()
    assert outcome.path is not None
    assert torch.equal(Reader(outcome.path).tensor("weights", "w"), full["weights"]["w"].local)
    assert writers() == before  # nothing was made anew


@pytest.mark.parametrize("staged", [True, False])
def test_weights_that_are_not_finite_are_marked(
    staged: bool, checkpointer: Checkpointer, tmp_path: Path
) -> None:
    groups = state()
    if staged:
        checkpointer.stage(groups)
    checkpointer.save(save(1, groups), wait=True)
    groups["weights"]["b"].local[3] = float("inf")
    checkpointer.save(save(2, groups), wait=True)
    paths = [outcome.path for outcome in checkpointer.outcomes()]
    assert [read_manifest(path).facts.get("nonfinite") for path in paths if path] == [None, True]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "checkpoint-1\n"


def test_no_state_at_all(checkpointer: Checkpointer) -> None:
    checkpointer.stage({"weights": {}, "optimizer": {}})
    checkpointer.save(save(1, {"weights": {}, "optimizer": {}}), wait=True)
    (outcome,) = checkpointer.outcomes()
    assert outcome.path is not None
    assert sorted(content(outcome.path)) == ["manifest.json", "manifest.sha256", "state.json"]


SAVE_FOREVER = """
import sys
from pathlib import Path
import torch
from glm_accelerate.checkpoint.checkpointer import Checkpointer, Save
from glm_accelerate.parallel.part import Part, part_of
made = Checkpointer(Path(sys.argv[1]))
for step in range(1, 10_000):
    groups = {"weights": {"a": part_of(torch.full((200_000,), float(step)))}}
    if step == 2 and sys.argv[2] == "staged":
        made.stage(groups)
    made.save(Save(step, 1, groups, {"position": step}, {}, {}), wait=True)
    (outcome,) = made.outcomes()
    assert outcome.error is None
"""


@pytest.mark.parametrize("mode", ["staged", "plain"])
def test_killed_while_saving(mode: str, tmp_path: Path, spawn: Callable[..., subprocess.Popen[str]]) -> None:
    """SIGKILL at random moments of a process that does nothing but save: whatever is published verifies."""
    draw = random.Random(2)
    for number in range(2):
        run = tmp_path / str(number)
        run.mkdir()
        process = spawn([sys.executable, "-c", SAVE_FOREVER, str(run), mode])
        while not (run / "checkpoints" / "checkpoint-3").exists():
            assert process.poll() is None
            time.sleep(0.005)
        mine = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(mine) == (mode == "staged")
        time.sleep(draw.random() * 0.15)
        process.kill()
        process.wait()
        until = time.monotonic() + 5
        while any(alive(int(writer)) for writer in mine):  # the writer goes with its parent
            assert time.monotonic() < until
            time.sleep(0.005)
        published = list((run / "checkpoints").glob("checkpoint-*"))
        assert len(published) >= 3
        for path in published:
            step = verify(path).step
            assert torch.equal(Reader(path).tensor("weights", "a"), torch.full((200_000,), float(step)))
        assert sum(path.name.startswith(".checkpoint") for path in (run / "checkpoints").iterdir()) <= 1


def alive(process: int) -> bool:
    """A zombie is not: nobody here has to reap a grandchild."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
