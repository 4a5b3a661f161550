"""An evaluation that a person asks for, while the run goes on."""

import shutil
from pathlib import Path
from typing import Any

import torch
import yaml

from glm_accelerate.checkpoint.lease import is_leased
from glm_accelerate.checkpoint.retain import drop
from glm_accelerate.config.load import load_config
from glm_accelerate.evaluate.measuring.by_hand import EvaluationOptions, evaluate_run
from glm_accelerate.training.run import train


def test_all_that_is_read_is_held(tiny_run: dict[str, Any], tmp_path: Path) -> None:
    """Its own weights and those of the best, which a trainer that finds a better one lets go."""
    said = {
        **tiny_run,
        "train": {"steps": 4, "step_samples": 4},
        "evaluate": {"metrics": ["loss"], "every": 2, "where": "inline"},
        "checkpoint": {"every": 2, "wait": True},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(said))
    run = tmp_path / "run"
    train(load_config(tmp_path / "config.yaml"), run)
    asked, best = run / "checkpoints" / "checkpoint-2", run / "snapshots" / "snapshot-4"
    shutil.copytree(run / "checkpoints" / "checkpoint-4", best)
    (run / "best").write_text("snapshots/snapshot-4\n")
    held: list[tuple[bool, bool, bool]] = []

    def watch(what: str, done: int, total: int) -> None:
        held.append((is_leased(asked), is_leased(best), drop(best)))

    found = evaluate_run(asked, EvaluationOptions(), torch.device("cpu"), watch).result
    assert found.against is not None
    assert found.against.step == 4
    assert set(held) == {(True, True, False)}
    assert not is_leased(best)
    assert drop(best)
    assert (
        evaluate_run(asked, EvaluationOptions(), torch.device("cpu"), lambda *_: None).result.loss
        == found.loss
    )
