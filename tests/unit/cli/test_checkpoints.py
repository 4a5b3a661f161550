"""`checkpoints RUN prune` deletes what the trainer would, and nothing that the config keeps."""

import json
from pathlib import Path

import pytest
import torch

from glm_accelerate.checkpoint.find import published
from glm_accelerate.cli.main import main
from glm_accelerate.config.load import to_yaml
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.evaluate.protocol.ledger import post, publish
from glm_accelerate.evaluate.protocol.messages import EvaluationResult, Findings, Request
from tests.checkpoints import save


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


def test_prune_keeps_what_was_there_before_the_loss_jumped(tmp_path: Path) -> None:
    """Also before a checkpoint since then has said so: the events do."""
    said = {"model": {"path": "m"}, "data": {"train": "t"}, "checkpoint": {"keep_last": 1}}
    (tmp_path / "config.yaml").write_text(to_yaml(RunConfig.model_validate(said)))
    for step in (2, 4):
        save(tmp_path, step, 1, weights={}, optimizer={}, state={}, fingerprints={}, facts={})
    losses = {1: 2.0, 2: 2.0, 3: 2.0, 4: 2.0, 5: 9.0}
    lines = [
        {"kind": "step", "attempt": 1, "step": step, "applied": True, "loss": loss}
        for step, loss in losses.items()
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["checkpoints", str(tmp_path), "prune"]) == 0
    assert [path.name for path in published(tmp_path)] == ["checkpoint-4", "checkpoint-2"]


def test_what_evaluations_beside_training_found_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their results come after the checkpoint is written. One that still waits keeps its checkpoint."""
    said = {"model": {"path": "m"}, "data": {"train": "t"}, "checkpoint": {"keep_last": 1, "keep_best": 1}}
    (tmp_path / "config.yaml").write_text(to_yaml(RunConfig.model_validate(said)))
    for step in range(1, 6):
        save(tmp_path, step, 1, weights={}, optimizer={}, state={}, fingerprints={}, facts={"loss": None})
    for step, loss in ((1, 2.5), (3, 2.0), (4, 2.25), (5, 2.125)):
        publish(tmp_path, Findings(EvaluationResult(step, "0123abcd", 1, "done", loss=loss)))
    post(tmp_path, Request(2, "0123abcd", 1, "snapshots/snapshot-2"))
    assert main(["checkpoints", str(tmp_path), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert {one["step"]: one["loss"] for one in seen} == {5: 2.125, 4: 2.25, 3: 2.0, 2: None, 1: 2.5}
    assert main(["checkpoints", str(tmp_path), "prune"]) == 0
    assert [path.name for path in published(tmp_path)] == [f"checkpoint-{step}" for step in (5, 3, 2)]


def test_names_with_brackets_are_shown_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [str(tmp_path / "a[/x]"), str(tmp_path / "b[bold]")]
    for name, path in (("br[bold]", "t[/x]"), ("br[bold]", "u[/y]")):
        facts, run = {"data": path, name: path}, Path(names[0 if path == "t[/x]" else 1])
        save(run, 1, 1, weights={}, optimizer={}, state={}, fingerprints=facts, facts={})
    found = [f"{name}/checkpoints/checkpoint-1" for name in names]
    assert main(["checkpoints", str(tmp_path), "diff", *found]) == 0
    shown = "".join(capsys.readouterr().out.split())
    assert all(word in shown for word in ("br[bold]", "t[/x]", "u[/y]"))
