"""`checkpoints RUN prune` deletes what the trainer would, and nothing that the config keeps."""

from pathlib import Path

import pytest
import torch

from glm_accelerate.checkpoint.find import published
from glm_accelerate.checkpoint.save import save
from glm_accelerate.cli.main import main
from glm_accelerate.config.load import to_yaml
from glm_accelerate.config.schema import RunConfig


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ({}, [5]),
        ({"keep_every_steps": 2}, [5, 4, 2]),
        ({"keep_every_hours": 1e-9}, [5, 4, 3, 2, 1]),
        ({"keep_last": 2}, [5, 4]),
    ],
)
def test_prune_keeps_all_that_the_config_says(
    keep: dict[str, float], left: list[int], tmp_path: Path
) -> None:
    said = {"model": {"path": "m"}, "data": {"train": "t"}, "checkpoint": {"keep_last": 1, **keep}}
    (tmp_path / "config.yaml").write_text(to_yaml(RunConfig.model_validate(said)))
    for step in range(1, 6):
        tensors = {"a": torch.zeros(2)}
        save(tmp_path, step, 1, weights=tensors, optimizer={}, state={}, fingerprints={}, facts={})
    assert main(["checkpoints", str(tmp_path), "prune"]) == 0
    assert [path.name for path in published(tmp_path)] == [f"checkpoint-{step}" for step in left]
