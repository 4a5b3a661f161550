"""Which weights verbs open for a run, and what they say of it."""

from pathlib import Path

import pytest
import torch

from glm_accelerate.checkpoint.checkpointer import Checkpointer, Save
from glm_accelerate.cli.chosen import Chosen, chosen, run_of
from glm_accelerate.parallel.part import part_of
from glm_accelerate.runtime.errors import UserError
from tests.checkpoints import save


def test_the_best_else_the_newest_and_it_says_which(tmp_path: Path) -> None:
    for step in (5, 1200):
        weights = {"a": torch.zeros(2)}
        made = save(tmp_path, step, 1, weights=weights, optimizer={}, state={}, fingerprints={}, facts={})
    newest, run = made.path, str(tmp_path)
    assert chosen(run) == Chosen(newest, "the newest", "step 1,200, the newest: no best is named yet")
    (tmp_path / "best").write_text("snapshots/snapshot-360\n")
    assert chosen(run) == Chosen(newest, "the newest", "step 1,200, the newest: the best is gone or damaged")
    groups = {"weights": {"a": part_of(torch.zeros(2))}}
    Checkpointer(tmp_path, kind="snapshot").save(Save(360, 1, groups, {}, {}, {}))
    snapshot = tmp_path / "snapshots/snapshot-360"
    said = f"step 360, the best of {run} (snapshots/snapshot-360)"
    assert chosen(run) == Chosen(snapshot, "the best", said)
    assert chosen(str(newest)) == Chosen(newest)  # it says itself which it is
    assert run_of(newest) is None
    (tmp_path / "config.yaml").touch()
    assert run_of(newest) == run_of(snapshot) == tmp_path.resolve()
    assert run_of(tmp_path) is None


def test_what_may_be_a_hubs_name_is_left_as_it_is(tmp_path: Path) -> None:
    assert chosen("THUDM/GLM-4-9B-0414") == Chosen(Path("THUDM/GLM-4-9B-0414"))
    assert chosen("modelscope:x") == Chosen(Path("modelscope:x"))
    (tmp_path / "file").touch()
    for nothing in ("nosuch", "./nosuch", str(tmp_path / "nosuch"), str(tmp_path / "file")):
        with pytest.raises(UserError, match=r"is here \(check PATH\)"):
            chosen(nothing)
    with pytest.raises(UserError, match=r"is here \(check PATH\)"):
        chosen(str(tmp_path))  # an empty directory
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UserError, match="no checkpoint here"):
        chosen(str(tmp_path))


def test_a_mistyped_run_beside_others_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert chosen("runs/mine") == Chosen(Path("runs/mine"))
    (tmp_path / "runs/mine").mkdir(parents=True)
    (tmp_path / "runs/mine/config.yaml").touch()
    with pytest.raises(UserError, match=r"runs/mien: no run.*is here \(check PATH\)"):
        chosen("runs/mien")
