"""Runs in float16, real ones: overflow and recovery, the floor, a layer that float16 cannot hold, resume."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from glm_accelerate.checkpoint.audit import compare
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.types import Step
from glm_accelerate.observe.events import read_events
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.training import loop
from glm_accelerate.training.run import train
from glm_accelerate.training.step import StepOutcome, WholeModel

Said = dict[str, Any]
LAST = 14


def config_of(tiny_run: Said, compute: str = "float16", **precision: float) -> RunConfig:
    said = {
        **tiny_run,
        "precision": {"compute": compute, **precision},
        "checkpoint": {"every": 4, "wait": True},
    }
    said["evaluate"] = {"every": 7, "metrics": ["loss", "exact_match"], "max_new_tokens": 4}
    return RunConfig.model_validate(said)


def spoil(tiny_run: Said, factor: float) -> None:
    """One layer's numbers get far larger; its norm makes them ordinary again."""
    file = Path(tiny_run["model"]["path"]) / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.gate_up_proj.weight"] *= factor
    save_file(weights, file, metadata={"format": "pt"})


def events(run: Path, kind: str) -> list[Said]:
    return [event for event in read_events(run / "events.jsonl") if event["kind"] == kind]


def choices(run: Path) -> list[Said]:
    """Of layers, among other decisions."""
    return [event for event in events(run, "decision") if "wide" in event]


def test_overflow_recovery_and_a_resume_in_the_middle_of_it(tiny_run: Said, tmp_path: Path) -> None:
    config = config_of(tiny_run, loss_scale=2.0**24, raise_after=3)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(config, whole)
    steps = events(whole, "step")
    first = next(place for place, step in enumerate(steps) if step["applied"])
    assert 2 <= first <= 8  # skipped until the scale was low enough
    assert [step["loss_scale"] for step in steps[: first + 1]] == [2.0 ** (24 - n) for n in range(first + 1)]
    assert steps[first + 1]["learning_rate"] < steps[0]["learning_rate"] == steps[first]["learning_rate"]
    scales = [step["loss_scale"] for step in steps]
    assert any(later > earlier for earlier, later in pairwise(scales))  # and it rose again
    assert not train(config, cut, stop_after=first - 1).done
    train(config, cut)
    assert (
        list(compare(whole / f"checkpoints/checkpoint-{LAST}", cut / f"checkpoints/checkpoint-{LAST}")) == []
    )


def test_float16_learns_what_float32_learns(tiny_run: Said, tmp_path: Path) -> None:
    losses: list[list[float]] = []
    for compute in ("float32", "float16"):
        train(config_of(tiny_run, compute), tmp_path / compute)
        losses.append([step["loss"] for step in events(tmp_path / compute, "step")])
        assert ("loss_scale" in events(tmp_path / compute, "step")[0]) == (compute == "float16")
    assert losses[1] == pytest.approx(losses[0], abs=0.01)
    assert losses[1] != losses[0]


def test_a_layer_that_overflows_is_found_moved_and_the_run_learns(tiny_run: Said, tmp_path: Path) -> None:
    spoil(tiny_run, 1000.0)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(config_of(tiny_run), whole)
    (told,) = choices(whole)
    assert told["wide"] == {"layers.1": "float32"}
    assert told["extremes"]["layers.1"]["value"] > 65504 > 4 * told["extremes"]["layers.0"]["value"]
    assert "float32 instead of float16" in told["said"]
    steps = events(whole, "step")
    assert all(step["applied"] for step in steps)
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.1
    train(config_of(tiny_run), cut, stop_after=5)
    train(config_of(tiny_run), cut)
    assert len(choices(cut)) == 1  # the choice came out of the checkpoint
    assert (
        list(compare(whole / f"checkpoints/checkpoint-{LAST}", cut / f"checkpoints/checkpoint-{LAST}")) == []
    )


def test_at_the_lowest_scale_an_overflow_is_a_bad_step(
    tiny_run: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two halvings are no fault, then `max_bad_steps` count, and the layers are looked at once more."""
    real = loop.train_step

    def spoilt(passes: WholeModel, *more: Any) -> StepOutcome:
        def infinite(step: Step, scale: float) -> Tensor:
            loss = passes(step, scale)
            next(one.grad for one in passes.model.parameters() if one.grad is not None).fill_(math.inf)
            return loss

        return real(infinite, *more)

    monkeypatch.setattr(loop, "train_step", spoilt)
    said = {**tiny_run, "train": {"steps": LAST, "step_samples": 4, "max_bad_steps": 3}}
    with pytest.raises(
        UserError, match=r"not finite 3 steps in a row \(up to step 5\), at the lowest loss scale"
    ):
        train(config_of(said, loss_scale=4.0), tmp_path / "run")
    assert [step["loss_scale"] for step in events(tmp_path / "run", "step")] == [4.0, 2.0, 1.0, 1.0, 1.0]
    assert [told["step"] for told in choices(tmp_path / "run")] == [1, 4]


@pytest.mark.parametrize("method", ["full", "freeze", "prefix"])
def test_every_method_trains_in_float16(method: str, tiny_run: Said, tmp_path: Path) -> None:
    said = {**tiny_run, "adapt": {"method": method, "layers": 1, "prefix_tokens": 4}}
    train(config_of(said), tmp_path / "run")
    steps = events(tmp_path / "run", "step")
    assert all(step["applied"] for step in steps)
    assert steps[-1]["loss"] < steps[0]["loss"]


def test_the_plan_says_what_float16_comes_with(tiny_run: Said, tmp_path: Path) -> None:
    train(config_of(tiny_run, loss_scale=4096.0), tmp_path / "run", stop_after=1)
    plan = json.loads((tmp_path / "run/plan.json").read_text(encoding="utf-8"))
    (why,) = [reason["why"] for reason in plan["reasons"] if reason["name"] == "compute"]
    assert plan["compute"] == "float16"
    assert why == "the config; norms and loss float32, the loss times 4,096 at first"


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU says")
def test_fp8_is_refused_by_name_where_nothing_multiplies_it(tiny_run: Said, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"precision\.compute is fp8: there is no GPU") as caught:
        train(config_of(tiny_run, "fp8"), tmp_path / "run")
    assert caught.value.cure == "precision.compute=bfloat16"
