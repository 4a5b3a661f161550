"""Where a start begins, each way by itself; and what of a changed config is refused."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from glm_accelerate.checkpoint.format import Damaged
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.config.load import absolute, to_yaml
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.training.directory import (
    ConfigChanged,
    StartChoice,
    check_config,
    choose_start,
    differences,
    read_first,
)
from tests.checkpoints import save


def make(run: Path, step: int) -> Path:
    weights = {"a": torch.full((4,), float(step))}
    return save(run, step, 1, weights=weights, optimizer={}, state={}, fingerprints={}, facts={}).path


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def weights(path: Path) -> float:
    return Reader(path).group("weights")["a"].sum().item()


def test_auto_goes_on_from_the_newest_that_reads_whole(tmp_path: Path) -> None:
    made = [make(tmp_path, step) for step in (1, 2, 3, 4)]
    (made[3] / "manifest.json").unlink()
    flip(made[2] / "weights-0-of-1.safetensors")  # seen only by who reads it
    choice = choose_start(tmp_path, "auto")
    assert choice.paths == (made[2], made[1], made[0])
    assert not choice.explicit
    got, warnings = read_first(choice, weights)
    assert got == 8.0
    assert "checkpoint-4" in warnings[0]
    assert "passed over" in warnings[-1]
    assert "checkpoint-3: weights-0-of-1.safetensors is damaged" in warnings[-1]


def test_auto_never_begins_anew_where_all_are_damaged(tmp_path: Path) -> None:
    assert read_first(choose_start(tmp_path, "auto"), weights) == (None, [])
    path = make(tmp_path, 1)
    flip(path / "weights-0-of-1.safetensors")
    with pytest.raises(UserError, match=r"none of its checkpoints.*--resume never"):
        read_first(choose_start(tmp_path, "auto"), weights)
    (path / "manifest.sha256").unlink()
    with pytest.raises(UserError, match=r"none of its checkpoints.*--resume never"):
        choose_start(tmp_path, "auto")


def test_never_looks_at_nothing_and_moves_nothing(tmp_path: Path) -> None:
    made = make(tmp_path, 700)
    assert choose_start(tmp_path, "never") == StartChoice(())
    assert made.is_dir()


def test_a_run_with_abandoned_checkpoints_alone_is_not_begun_anew_unasked(tmp_path: Path) -> None:
    make(tmp_path, 700).rename((tmp_path / "abandoned").with_name("x"))
    (tmp_path / "abandoned").mkdir()
    (tmp_path / "x").rename(tmp_path / "abandoned" / "checkpoint-700")
    with pytest.raises(UserError, match=r"all in abandoned/.*--resume never"):
        choose_start(tmp_path, "auto")


def test_a_named_one_has_to_do(tmp_path: Path) -> None:
    make(tmp_path, 1)
    path = make(tmp_path, 2)
    flip(path / "weights-0-of-1.safetensors")
    for name in ("2", str(path)):
        choice = choose_start(tmp_path, name)
        assert choice.explicit
        with pytest.raises(Damaged, match="weights-0-of-1"):
            read_first(choice, weights)
    for step in ("5", "02", "9" * 5000):
        with pytest.raises(UserError, match=r"no checkpoint of step .*there are 1, 2"):
            choose_start(tmp_path, step)
    for name in (str(tmp_path / "nowhere"), "newest", "٣"):
        with pytest.raises(UserError, match="no such checkpoint"):
            choose_start(tmp_path, name)
    path.rename(path.with_name("checkpoint-3"))
    with pytest.raises(Damaged, match="the name says step 3, the manifest says 2"):
        read_first(choose_start(tmp_path, "3"), weights)


def test_a_read_only_archive_can_be_gone_on_from(tmp_path: Path) -> None:
    path = make(tmp_path / "archive", 2)
    before = sorted(os.listdir(path.parent))
    path.chmod(0o500)
    assert read_first(choose_start(tmp_path / "run", str(path)), weights) == (8.0, [])
    assert sorted(os.listdir(path.parent)) == before


def test_a_changed_config_says_what_accepts_it(tmp_path: Path) -> None:
    def config(**train: Any) -> RunConfig:
        return RunConfig.model_validate({"model": {"path": "m"}, "data": {"train": "t"}, "train": train})

    (tmp_path / "config.yaml").write_text(to_yaml(absolute(config())))
    check_config(tmp_path, absolute(config(steps=2)), ())  # it never began
    (tmp_path / "events.jsonl").touch()
    changed = absolute(config(steps=9, seed=1, max_bad_steps=3))
    with pytest.raises(ConfigChanged) as caught:
        check_config(tmp_path, changed, {"schedule"})
    assert {change.key: change.flag for change in caught.value.changes} == {
        "train.seed": "--accept order",
        "train.max_bad_steps": "--accept config",
    }
    check_config(tmp_path, changed, {"schedule", "order", "config"})
    check_config(tmp_path, absolute(config()), ())


def test_a_change_that_moves_the_end_too_names_both(tmp_path: Path) -> None:
    """Steps of another size are another number in an epoch: one refusal has to do."""

    def config(**train: Any) -> RunConfig:
        data = {"train": "t"}
        return RunConfig.model_validate({"model": {"path": "m"}, "data": data, "train": train})

    def flags(then: RunConfig, now: RunConfig) -> str:
        return str(ConfigChanged(tmp_path, differences(then, now))).partition("(")[2].partition(" (or")[0]

    shorter = config(epochs=2.0, step_samples=4)
    assert set(flags(config(epochs=2.0), shorter).split()[1::2]) == {"order", "schedule"}
    assert len(flags(config(epochs=3.0), shorter).split()) == 4  # each once
    assert flags(config(steps=9), config(steps=9, step_samples=4)) == "--accept order"
