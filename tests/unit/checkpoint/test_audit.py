"""Damage is found and its file named (single bits: tests/system/test_damage.py); differences are measured."""

import json
import os
from pathlib import Path

import pytest
import torch

from glm_accelerate.checkpoint.audit import audit, compare
from glm_accelerate.checkpoint.checkpointer import Checkpointer, Save
from glm_accelerate.checkpoint.lease import lease
from glm_accelerate.cli.main import main
from glm_accelerate.config.load import to_yaml
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.parallel.part import part_of
from tests.checkpoints import save


def make(run: Path, step: int, weight: float = 1.0, **facts: object) -> Path:
    return save(
        run,
        step,
        1,
        weights={"a": torch.full((40, 3), weight), "b": torch.arange(5).bfloat16()},
        optimizer={"a::step": torch.tensor(float(step)), "a::exp_avg": torch.zeros(40, 3)},
        state={"position": step, "losses": {"0": 2.5, str(step): weight}},
        fingerprints={"data": "d", "threads": str(step)},
        facts=facts,
    ).path


def test_each_damaged_file_is_named_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make(tmp_path, 2)
    os.truncate(path / "weights-0-of-1.safetensors", 10)
    (path / "state.json").unlink()
    (path / "optimizer-0-of-1.safetensors").write_bytes(b"")
    (path / "note.txt").write_text("mine")
    assert main(["checkpoints", str(path), "verify"]) == 2  # by its own path
    said = capsys.readouterr().out
    assert said.count("should be") == 3
    assert "does not belong to it: note.txt" in said


def test_swapped_and_sparse_files(tmp_path: Path) -> None:
    one, other = make(tmp_path, 1), make(tmp_path, 2, weight=3.0)
    name = "weights-0-of-1.safetensors"
    first, second = (one / name).read_bytes(), (other / name).read_bytes()
    assert len(first) == len(second)
    (one / name).write_bytes(second)
    assert name in audit(one).damaged[0]
    (one / name).write_bytes(b"")
    os.truncate(one / name, len(first))
    assert name in audit(one).damaged[0]


def test_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = make(tmp_path, 1), make(tmp_path, 2, weight=1.5)
    found = {(one.kind, one.name): one for one in compare(one, other)}
    assert found.keys() == {
        ("weights", "a"), ("optimizer", "a::step"), ("fingerprint", "threads"), ("state", "position"),
        ("state", "losses.1"), ("state", "losses.2"),
    }  # fmt: skip
    assert found["weights", "a"].most == 0.5
    assert found["state", "losses.1"].second == "none"
    assert list(compare(one, one)) == []
    assert main(["checkpoints", str(tmp_path), "diff", "1", "2"]) == 0
    assert "max |difference|" in capsys.readouterr().out
    assert main(["checkpoints", str(tmp_path), "diff", "1"]) == 2
    assert main(["checkpoints", str(tmp_path), "diff", "1", "5"]) == 2


def test_the_best_is_listed_where_it_is_no_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (2, 4, 6):
        make(tmp_path, step, loss=1.0 / step)
    for step in (4, 5):
        groups = {"weights": {"a": part_of(torch.zeros(2))}}
        Checkpointer(tmp_path, kind="snapshot").save(Save(step, 1, groups, {}, {}, {}))
    for best, listed in ((4, [6, 4, 2]), (5, [6, 5, 4, 2]), (7, [6, 4, 2])):  # 7 is not there (any more)
        (tmp_path / "best").write_text(f"snapshots/snapshot-{best}\n")
        assert main(["checkpoints", str(tmp_path), "--json"]) == 0
        seen = json.loads(capsys.readouterr().out)
        assert [one["step"] for one in seen] == listed
        assert [one["step"] for one in seen if one["best"]] == [step for step in listed if step == best]
        assert [one["step"] for one in seen if one["kind"] == "snapshot"] == ([5] if best == 5 else [])
    (tmp_path / "best").write_text("snapshots/snapshot-5\n")
    assert main(["checkpoints", str(tmp_path)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "best" in line]
    assert line.split()[0] == "5"
    assert "best, snapshot" in line


def test_list_and_prune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step, loss in ((1, 0.5), (2, 3.0), (3, 2.0), (4, 1.0), (5, 4.0), (6, 9.0)):
        make(tmp_path, step, loss=loss)
    (tmp_path / "checkpoints" / "checkpoint-5" / "state.json").unlink()
    (tmp_path / "checkpoints" / "checkpoint-x").mkdir()
    (tmp_path / "best").write_text("checkpoints/checkpoint-4\n")  # by all samples; 1 was lower on a few
    assert main(["checkpoints", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "damaged" in said
    assert "'checkpoint-x'" in said
    with lease(tmp_path / "checkpoints" / "checkpoint-2"):
        assert main(["checkpoints", str(tmp_path), "--json"]) == 0
        seen = {one["step"]: one for one in json.loads(capsys.readouterr().out)}
        assert list(seen) == [6, 5, 4, 3, 2, 1]
        assert [step for step, one in seen.items() if one["best"]] == [4]
        assert [step for step, one in seen.items() if one["leased"]] == [2]
        assert [step for step, one in seen.items() if one["damage"]] == [5]
        assert seen[6]["codec"] == "none"
        assert main(["checkpoints", str(tmp_path), "prune"]) == 2  # nothing says what should stay
        capsys.readouterr()
        said = {
            "model": {"path": "m"},
            "data": {"train": "t"},
            "checkpoint": {"keep_last": 1, "keep_best": 1},
        }
        (tmp_path / "config.yaml").write_text(to_yaml(RunConfig.model_validate(said)))
        for words in (["--dry-run"], []):
            there = sorted(path.name for path in (tmp_path / "checkpoints").glob("checkpoint-?"))
            assert main(["checkpoints", str(tmp_path), "prune", *words]) == 0
            assert ": 1, 3; 3 stay" in capsys.readouterr().out
            if words:
                assert sorted(path.name for path in (tmp_path / "checkpoints").glob("checkpoint-?")) == there
    left = sorted(path.name for path in (tmp_path / "checkpoints").glob("checkpoint-[0-9]"))
    assert left == [f"checkpoint-{step}" for step in (2, 4, 5, 6)]
