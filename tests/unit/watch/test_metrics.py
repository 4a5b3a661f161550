"""The newest figures, as Prometheus' own parser reads them."""

import json
from pathlib import Path
from typing import Any

import pytest

from glm_accelerate.cli.main import main
from glm_accelerate.watch.metrics import Metrics
from glm_accelerate.watch.run import WatchedRun

parser = pytest.importorskip("prometheus_client.parser")


def log(run: Path, *events: dict[str, Any]) -> None:
    run.mkdir(exist_ok=True)
    with (run / "events.jsonl").open("a") as file:
        file.write(
            "".join(json.dumps({"time": 1.5e9 + place, **one}) + "\n" for place, one in enumerate(events))
        )


def read(text: str) -> dict[tuple[str, str], dict[str, float]]:
    """Values by labels, by figure and kind; the parser refuses a family that comes twice."""
    families = list(parser.text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    assert all(family.documentation for family in families)
    for family in families:
        assert {sample.name for sample in family.samples} <= {family.name, f"{family.name}_total"}
    return {
        (family.name, family.type): {
            " ".join(sample.labels[key] for key in sorted(sample.labels, reverse=True)): sample.value
            for sample in family.samples
        }
        for family in families
    }


def test_the_newest_of_each_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = 'a "b"\\n'
    one, other = tmp_path / "one", tmp_path / "other"
    step = {"kind": "step", "loss": 2.5, "tokens_per_second": 1e6, "memory_bytes": 7}
    log(one, {"kind": "start", "step": 0, "steps": 9, "attempt": 1}, {**step, "step": 1}, {"kind": "warning"})
    metrics = Metrics([WatchedRun(one, name), WatchedRun(other, "other")])
    assert read(metrics.text())["glm_step", "gauge"] == {name: 1}
    evaluated = {"kind": "eval", "step": 2, "status": "done", "loss": 1.25, "metrics": {"bleu_4": 30.5}}
    log(
        one,
        {**step, "step": 2, "loss": None},
        evaluated,
        {**evaluated, "status": "skipped", "step": 3, "loss": None},
    )
    log(
        other,
        {"kind": "resume", "step": 4, "steps": 5, "ranks": 2},
        {"kind": "stop", "reason": "done", "step": 5},
    )
    (other / "ranks").mkdir()
    ranks = [{"rank": number, "process": None} for number in range(2)]
    node = {
        "node": "n",
        "time": 1.5e9,
        "attempt": 1,
        "load": 1.5,
        "cores": 2,
        "memory": {"free": 1, "whole": 2},
    }
    (other / "ranks/n.json").write_text(json.dumps(node | {"ended": False, "others": [], "ranks": ranks}))
    found = read(metrics.text())
    assert found["glm_silent_ranks", "gauge"] == {"other": 2}
    assert found["glm_step", "gauge"] == {name: 2}
    assert ("glm_loss", "gauge") not in found  # it was not finite
    assert found["glm_held_out_loss", "gauge"] == {name: 1.25}
    assert found["glm_evaluation", "gauge"] == {f"{name} bleu_4": 30.5}
    assert found["glm_warnings", "counter"] == {name: 1, "other": 0}
    assert found["glm_ended", "gauge"] == {name: 0, "other done": 1}
    assert found["glm_ranks", "gauge"] == {"other": 2}
    assert found["glm_tokens_per_second", "gauge"] == {name: 1e6}
    assert main(["watch", str(one), str(one), str(other), "--metrics"]) == 0  # the same run twice is one
    printed = capsys.readouterr().out
    assert read(printed)["glm_warnings", "counter"] == {"one": 1, "other": 0}
    (one / "events.jsonl").unlink()
    log(one, {"kind": "start", "step": 0, "steps": 3})
    assert read(metrics.text())["glm_steps", "gauge"] == {name: 3, "other": 5}


def test_a_run_without_events_has_no_figures(tmp_path: Path) -> None:
    assert Metrics([WatchedRun(tmp_path, "run")]).text() == ""
