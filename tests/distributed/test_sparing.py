"""Ranks that share products, and stages, recompute no more than they must, and learn the same."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from glm_accelerate.config.load import override
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.observe.events import read_events
from glm_accelerate.plan.ground import ground_of
from glm_accelerate.plan.hardware import detect
from glm_accelerate.plan.resolve import resolve
from glm_accelerate.plan.run_plan import RunPlan


def planned(config: RunConfig, ranks: int, *words: str) -> RunPlan:
    return resolve(override(config, list(words)), ground_of(config, replace(detect(), device="cpu"), ranks))


def figures(run: Path) -> list[tuple[float, float]]:
    steps = [event for event in read_events(run / "events.jsonl") if event["kind"] == "step"]
    return [(float(str(event["loss"])), float(str(event["grad_norm"]))) for event in steps]


@pytest.mark.parametrize("layout", ["tensor", "pipeline", "shard"])
def test_between_all_and_nothing(
    layout: str, tiny_run: dict[str, Any], tmp_path: Path, go: Callable[..., str]
) -> None:
    said = {**tiny_run, "adapt": {"method": "full"}, "parallel": {"shard": "off", layout: 2}}
    said["precision"] = {"compile": "off"}
    config = RunConfig.model_validate(said)
    plans = [planned(config, 2, f"memory.recompute={how}") for how in ("off", "blocks")]
    most, least = (plan.memory.needed for plan in plans if plan.memory is not None)
    words = [
        f"memory.limit={(least + 4 * most) // 5 / 2**20:.3f}MiB",
        f"train.micro_tokens={plans[0].micro_tokens}",
    ]
    assert 0 < planned(config, 2, *words).spare_bytes < most - least
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(said))
    go(path, tmp_path / "plain", 2, words[1])
    go(path, tmp_path / "sparing", 2, *words)
    events = [str(event.get("said")) for event in read_events(tmp_path / "sparing/events.jsonl")]
    assert [text for text in events if text.startswith("blocks recompute")]
    assert figures(tmp_path / "plain") == figures(tmp_path / "sparing")
