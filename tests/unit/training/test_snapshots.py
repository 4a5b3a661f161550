"""The file that names a run's best weights."""

from pathlib import Path

from glm_accelerate.checkpoint.format import path_of
from glm_accelerate.training.snapshots import BestWeights


def test_it_names_what_is_there_and_awaits_what_is_not(tmp_path: Path) -> None:
    best, file = BestWeights(tmp_path), tmp_path / "best"
    best.name(3)
    assert (best.awaited, file.exists()) == (3, False)
    path_of(tmp_path, "checkpoint", 3).mkdir(parents=True)
    best.name(3)
    assert (best.awaited, file.read_text()) == (None, "checkpoints/checkpoint-3\n")
    path_of(tmp_path, "snapshot", 3).mkdir(parents=True)
    best.name(3)
    assert file.read_text() == "snapshots/snapshot-3\n"
    best.name(None)
    assert (best.awaited, file.exists()) == (None, False)
