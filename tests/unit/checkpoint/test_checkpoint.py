"""A checkpoint exists or it does not; damage is found and named; what must stay stays."""

from pathlib import Path

import torch

from glm_accelerate.checkpoint.find import published
from glm_accelerate.checkpoint.format import step_of
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.checkpoint.retain import abandon_after
from tests.checkpoints import keeping, latest, save, tidy


def make(run: Path, step: int, attempt: int = 1) -> Path:
    weights = {"a": torch.randn(5, 3), "b": torch.randn(4).bfloat16()}
    moments = {"a::step": torch.tensor(3.0), "a::exp_avg": torch.randn(5, 3)}
    saved = save(
        run,
        step,
        attempt,
        weights=weights,
        optimizer=moments,
        state={"position": step},
        fingerprints={"data": "d"},
        facts={"template": "glm4", "loss": None},
    )
    reader = Reader(saved.path)
    for group, tensors in (("weights", weights), ("optimizer", moments)):
        assert all(torch.equal(reader.tensor(group, name), tensor) for name, tensor in tensors.items())
    assert reader.state() == {"position": step}
    return saved.path


def test_only_full_names_are_checkpoints(tmp_path: Path) -> None:
    names = (
        "checkpoint-",
        "checkpoint-abc",
        "checkpoint-10-tmp",
        "checkpoint--5",
        "checkpoint-1e3",
        "Checkpoint-7",
    )
    odd = (
        *names,
        "tmp-checkpoint-5",
        "checkpoint-10.bak",
        "checkpoint-٣",
        "checkpoint-007",
        "checkpoint-" + "9" * 200,
    )
    for name in odd:
        assert step_of(name) is None
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "checkpoint-9").write_text("a file")
    for step in (9000, 10000, 2):
        make(tmp_path, step)
    assert [path.name for path in published(tmp_path)] == [
        "checkpoint-10000",
        "checkpoint-9000",
        "checkpoint-2",
    ]
    assert step_of("checkpoint-0") == 0


def test_the_newest_that_verifies_wins_whatever_the_pointer_says(tmp_path: Path) -> None:
    make(tmp_path, 3)
    newest = make(tmp_path, 9)
    (tmp_path / "checkpoints" / "latest").write_text("../../etc\n")
    found, reasons = latest(tmp_path)
    assert found == newest
    assert "does not hold a checkpoint's name" in reasons[0]
    (newest / "state.json").write_text("{}")
    found, reasons = latest(tmp_path)
    assert found is not None
    assert found.name == "checkpoint-3"
    assert any("state.json" in reason for reason in reasons)


def test_retain_and_abandon(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        make(tmp_path, step)
    assert tidy(tmp_path, keeping(2, 1), run_id=None, losses={1: 0.5}).deleted == (2,)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "checkpoint-1",
        "checkpoint-3",
        "checkpoint-4",
        "latest",
    ]
    assert abandon_after(tmp_path, 1) == [3, 4]
    make(tmp_path, 3)
    assert abandon_after(tmp_path, 1) == [3]
    assert sorted(path.name for path in (tmp_path / "abandoned").iterdir()) == [
        "checkpoint-3",
        "checkpoint-3.1",
        "checkpoint-4",
    ]
