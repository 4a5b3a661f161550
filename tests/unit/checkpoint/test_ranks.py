"""Several ranks, one checkpoint: they meet in the file system, and none is published without all of them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from glm_accelerate.checkpoint.checkpointer import Checkpointer, Save, SaveOutcome
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.checkpoint.retain import sweep
from glm_accelerate.parallel.part import Part, part_of
from tests.checkpoints import verify

RANK = """
import json, resource, signal, sys
from pathlib import Path
import torch
from glm_accelerate.checkpoint.checkpointer import Checkpointer, Save
from glm_accelerate.parallel.part import Part, part_of

run, rank, ranks, mode = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
whole = torch.arange(700.0).reshape(70, 10)
rows = 70 // ranks
groups = {"weights": {"w": Part(whole[rank * rows:(rank + 1) * rows], (70, 10), (rank * rows, 0))}}
if rank == 0:
    groups["optimizer"] = {"step": part_of(torch.tensor(5.0))}
made = Checkpointer(run, rank=rank, ranks=ranks, limit=20)
if mode == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
if mode == "staged":
    made.stage(groups)
for step in (1, 2):
    made.save(Save(step, 1, groups, {"rank": rank}, {}, {}), wait=True)
said = [[o.step, o.path and o.path.name, o.bytes, o.error] for o in made.close(1)]
print(json.dumps(said))
"""


def run_ranks(run: Path, modes: list[str]) -> list[list[list[object]]]:
    """What each rank's outcomes were."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(run), str(rank), str(len(modes)), mode],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, mode in enumerate(modes)
    ]
    answers = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(modes)
    return [json.loads(answer) for answer in answers]


def nothing(run: Path) -> bool:
    """Whether no more is left than word of the failure."""
    left = sorted((run / "checkpoints").iterdir())
    return [path.name for path in left] in ([".checkpoint-1.1.failed"], [".checkpoint-2.1.failed"], [])


@pytest.mark.process
def test_two_processes_publish_one_checkpoint(tmp_path: Path) -> None:
    said = run_ranks(tmp_path, ["staged", "plain"])
    for step in (1, 2):
        path = tmp_path / "checkpoints" / f"checkpoint-{step}"
        manifest = verify(path)
        assert manifest.ranks == 2
        assert sorted(manifest.files) == sorted(
            file.name for file in path.iterdir() if "man" not in file.name
        )
        assert sorted(manifest.files) == [
            "optimizer-0-of-2.safetensors",
            "state.json",
            "weights-0-of-2.safetensors",
            "weights-1-of-2.safetensors",
        ]
        assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o600}
        reader = Reader(path)
        assert torch.equal(reader.tensor("weights", "w"), torch.arange(700.0).reshape(70, 10))
        assert reader.state() == {"rank": 0}
        total = sum(entry.bytes for entry in manifest.files.values())
        mine = manifest.files["weights-1-of-2.safetensors"].bytes
        assert said[0][step - 1] == [step, f"checkpoint-{step}", total, None]
        assert said[1][step - 1] == [step, f"checkpoint-{step}", mine, None]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "checkpoint-1",
        "checkpoint-2",
        "latest",
    ]


@pytest.mark.process
def test_one_rank_that_fails_fails_them_all_by_name(tmp_path: Path) -> None:
    said = run_ranks(tmp_path, ["staged", "full"])
    for _, path, _, error in said[0]:
        assert path is None
        assert str(error).startswith("rank 1 failed: cannot be written")
        assert "File too large" in str(error)
    assert all(path is None and "File too large" in str(error) for _, path, _, error in said[1])
    assert nothing(tmp_path)


def piece(rank: int, rows: int = 2) -> dict[str, dict[str, Part]]:
    return {"weights": {"w": Part(torch.full((rows, 3), float(rank)), (4, 3), (2 * rank, 0))}}


def finish(*made: Checkpointer) -> list[SaveOutcome]:
    until = time.monotonic() + 60
    while sum(checkpointer.busy() for checkpointer in made):
        assert time.monotonic() < until
        time.sleep(0.01)
    return [outcome for checkpointer in made for outcome in checkpointer.close(1)]


def pair(run: Path, limit: float = 20) -> tuple[list[Checkpointer], list[int]]:
    """Two ranks in this process, and the process ids of their writers."""
    made, known = [], children()
    for rank in (0, 1):
        made.append(Checkpointer(run, rank=rank, ranks=2, limit=limit))
        made[rank].stage(piece(rank))
    return made, sorted(children() - known)


def children() -> set[int]:
    return {int(child) for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    (first, second), _ = pair(tmp_path, limit=0.5)
    first.save(Save(1, 1, piece(0), {}, {}, {}))
    (outcome,) = finish(first)
    assert outcome.error == "rank 1 did not finish in 0.5 s"
    second.save(Save(2, 1, piece(1), {}, {}, {}))
    (outcome,) = finish(second)
    assert outcome.error == "rank 0 did not begin in 0.5 s"
    assert nothing(tmp_path)


@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_whose_writer_dies_is_named(dying: int, tmp_path: Path) -> None:
    """The second one's writer is stopped, so the first has written its part and waits."""
    made, writers = pair(tmp_path)
    os.kill(writers[1], signal.SIGSTOP)
    for rank, checkpointer in enumerate(made):
        checkpointer.save(Save(1, 1, piece(rank), {}, {}, {}))
    while not (tmp_path / "checkpoints/.checkpoint-1.1/state.json").exists():
        time.sleep(0.01)
    os.kill(writers[dying], signal.SIGKILL)
    (outcome,) = finish(made[dying])
    assert outcome.error == "the process that wrote it ended (signal 9)"
    if dying == 0:
        os.kill(writers[1], signal.SIGCONT)
    (outcome,) = finish(made[1 - dying])
    assert outcome.error == f"rank {dying} failed: the process that wrote it ended (signal 9)"
    assert nothing(tmp_path)


def test_a_rank_is_told_that_the_first_has_failed(tmp_path: Path) -> None:
    """Its part was written already."""
    made, writers = pair(tmp_path)
    for rank, checkpointer in enumerate(made):
        checkpointer.save(Save(1, 1, piece(rank), {}, {}, {}))
        while rank == 0 and not (tmp_path / "checkpoints/.checkpoint-1.1/state.json").exists():
            time.sleep(0.01)
        os.kill(writers[0], signal.SIGSTOP)
    while not (tmp_path / "checkpoints/.checkpoint-1.1/rank-1.json").exists():
        time.sleep(0.01)
    os.kill(writers[0], signal.SIGKILL)
    errors = [outcome.error for outcome in finish(*made)]
    assert errors == [
        "the process that wrote it ended (signal 9)",
        "rank 0 failed: the process that wrote it ended (signal 9)",
    ]
    assert nothing(tmp_path)


def test_pieces_that_leave_a_gap_are_refused(tmp_path: Path) -> None:
    (first, second), _ = pair(tmp_path)
    first.save(Save(1, 1, piece(0, rows=1), {}, {}, {}))
    second.save(Save(1, 1, piece(1), {}, {}, {}))
    outcomes = finish(first, second)
    assert outcomes[0].error == "cannot be written: the pieces of w hold 9 items, the whole has 12"
    assert outcomes[1].error == "rank 0 failed: " + outcomes[0].error
    assert nothing(tmp_path)


def test_what_was_left_by_a_dead_job_is_no_hindrance(tmp_path: Path) -> None:
    """The same step and attempt, half written: it is taken away, not taken over."""
    left = tmp_path / "checkpoints" / ".checkpoint-1.1"
    left.mkdir(parents=True)
    (left / "weights-0-of-2.safetensors").write_text("old")
    (first, second), _ = pair(tmp_path)
    first.save(Save(1, 1, piece(0), {}, {}, {}))
    while (left / "weights-0-of-2.safetensors").exists() and (
        left / "weights-0-of-2.safetensors"
    ).read_bytes()[:3] == b"old":
        time.sleep(0.005)
    second.save(Save(1, 1, piece(1), {}, {}, {}))
    assert [outcome.error for outcome in finish(first, second)] == [None, None]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint-1", "latest"]


def test_a_second_try_is_not_told_of_the_first(tmp_path: Path) -> None:
    """The first rank fails at once; the second comes late to it, and is early for the next."""
    (first, second), _ = pair(tmp_path)
    first.save(Save(1, 1, {"weights": {"w": part_of(torch.ones(1))}}, {}, {}, {}), wait=False)
    second.save(Save(1, 1, piece(1), {}, {}, {}))
    while first.busy() or second.busy():
        time.sleep(0.01)
    assert (tmp_path / "checkpoints/.checkpoint-1.1.failed").is_file()
    second.save(Save(1, 1, piece(1), {}, {}, {}))
    time.sleep(0.1)
    first.save(Save(1, 1, piece(0), {}, {}, {}))
    errors = [outcome.error for outcome in finish(first, second)]
    assert errors[0] == "the ranks disagree on what w is"
    assert errors[1:] == [None, "rank 0 failed: the ranks disagree on what w is", None]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint-1", "latest"]


def test_leftovers_are_swept(tmp_path: Path) -> None:
    for name in (".checkpoint-3.1", ".checkpoint-3.1.77.trash"):
        (tmp_path / name / "inner").mkdir(parents=True)
    for name in (".latest.abc", ".checkpoint-3.1.failed", "..checkpoint-3.1.failed.xyz"):
        (tmp_path / name).write_text("")
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "latest").write_text("checkpoint-2\n")
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "latest"]
