"""A run that fits only if something is recomputed recomputes no more than it must, and learns the same."""

import json
from pathlib import Path
from typing import Any

import torch

from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.config.load import override
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.observe.events import read_events
from glm_accelerate.plan.ground import ground_of
from glm_accelerate.plan.hardware import detect
from glm_accelerate.plan.resolve import resolve
from glm_accelerate.plan.run_plan import RunPlan
from glm_accelerate.training.run import train
from glm_accelerate.training.settle import Start


def planned(config: RunConfig, *words: str) -> RunPlan:
    config = override(config, list(words))
    return resolve(config, ground_of(config, detect()))


def needed(plan: RunPlan) -> int:
    assert plan.memory is not None
    return plan.memory.needed


def weights(run: Path) -> dict[str, torch.Tensor]:
    return Reader(run / "checkpoints/checkpoint-14").group("weights")


def test_between_all_and_nothing(tiny_run: dict[str, Any], tmp_path: Path) -> None:
    config = RunConfig.model_validate(tiny_run | {"adapt": {"method": "full"}})
    most, least = (needed(planned(config, f"memory.recompute={said}")) for said in ("off", "blocks"))
    assert least < most
    limit = f"memory.limit={(least + 4 * most) // 5 / 2**20:.3f}MiB"
    plan = planned(config, limit, f"train.micro_tokens={planned(config).micro_tokens}")
    assert plan.recompute
    assert 0 < plan.spare_bytes < most - least
    train(config, tmp_path / "plain")
    train(override(config, [limit, f"train.micro_tokens={plan.micro_tokens}"]), tmp_path / "sparing")
    said = [str(event.get("said")) for event in read_events(tmp_path / "sparing/events.jsonl")]
    (share,) = (words.split()[2] for words in said if words.startswith("blocks recompute"))
    assert 0 <= float(share.removesuffix("%")) < 100
    plain, sparing = weights(tmp_path / "plain"), weights(tmp_path / "sparing")
    assert [name for name in plain if not torch.equal(plain[name], sparing[name])] == []


def test_a_run_goes_on_in_the_passes_that_it_began_with(tiny_run: dict[str, Any], tmp_path: Path) -> None:
    """Whatever memory is free by then."""
    config, run = RunConfig.model_validate(tiny_run), tmp_path / "run"
    train(override(config, ["train.micro_tokens=128"]), run, stop_after=5)
    assert planned(config).micro_tokens != 128
    assert train(config, run, start=Start(accept=frozenset({"config"}))).done
    assert json.loads((run / "plan.json").read_text())["micro_tokens"] == 128
    said = [event["said"] for event in read_events(run / "events.jsonl") if event["kind"] == "warning"]
    assert not [words for words in said if "passes" in words]  # nothing is summed in another order
