"""Every kind of bench on a tiny run: figures that agree with each other, and nothing left behind."""

import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from glm_accelerate.bench import judge
from glm_accelerate.bench.checkpoint import checkpoint_report, measure_checkpoint
from glm_accelerate.bench.data import data_report, measure_data
from glm_accelerate.bench.kernels import kernels_report, measure_kernels
from glm_accelerate.bench.report import as_json, markdown
from glm_accelerate.bench.step import measure, step_report
from glm_accelerate.config.load import load_config, to_yaml
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.pack import ARRANGE

Said = dict[str, Any]


class Heard:
    """What a bench says while it works."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    def say(self, what: str, done: int, total: int) -> None:
        assert done >= 0
        self.phases.append(what)


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Temporary files of the bench, and nowhere else to write."""
    import_module("torch._dynamo")  # makes a folder of its own when it is first imported
    place = tmp_path / "scratch"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.chdir(place)
    return place


def config(said: Said, **sections: Said) -> RunConfig:
    return RunConfig.model_validate(
        {key: {**said.get(key, {}), **sections.get(key, {})} for key in said.keys() | sections.keys()}
    )


@pytest.mark.parametrize("method", ["lora", "full"])
def test_steps(tiny_run: Said, scratch: Path, method: str) -> None:
    heard = Heard()
    found = measure(config(tiny_run, adapt={"method": method}), steps=4, warmup=1, say=heard.say)
    assert list(scratch.iterdir()) == []
    assert heard.phases == [
        *["building"] * 2,
        "warming up",
        *["measuring"] * 4,
        "profiling",
        "measuring the peak",
    ]
    assert len(found.steps) == 4
    for step in found.steps:
        assert 0 <= step.waited < step.wall
        assert step.targets < step.tokens < step.computed
        assert step.loss > 0
    tokens, computed = (sum(getattr(step, name) for step in found.steps) for name in ("tokens", "computed"))
    assert found.padding == 1 - tokens / computed
    per_token = found.steps[0].flops / found.steps[0].tokens
    assert (2 if method == "full" else 1) * found.parameters < per_token < 6.5 * found.parameters
    assert 0 < found.utilisation < 1
    assert found.recompilations == 0
    assert found.memory_bytes > 0
    assert sum(found.breakdown.classes.values()) == pytest.approx(found.breakdown.seconds, rel=1e-6)
    shown = markdown(step_report(found, "tiny"))
    assert "matrix products" in shown
    assert '"tokens_per_second"' in as_json(step_report(found, "tiny"))


def test_a_run_shorter_than_the_bench_is_lengthened(tiny_run: Said) -> None:
    found = measure(config(tiny_run, train={"steps": 2}), steps=3, warmup=1, say=Heard().say)
    assert len(found.steps) == 3


def test_what_the_config_says_is_measured_as_it_trains(tiny_run: Said, scratch: Path) -> None:
    """Its file survives the way through YAML by which a comparison hands it on."""
    before = config(tiny_run, adapt={"targets": ["q_proj"]}, optim={"betas": [0.8, 0.9]})
    (scratch / "a.yaml").write_text(to_yaml(before))
    assert load_config(scratch / "a.yaml") == before


@pytest.mark.parametrize("adapt", [{"method": "lora"}, {"method": "full"}, {"method": "prefix"}], ids=str)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_operators(
    tiny_run: Said, scratch: Path, adapt: Said, compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "LEAST_SECONDS", 0.0)
    said = config(tiny_run, adapt=adapt, precision={"compute": compute})
    found = measure_kernels(said, 1, Heard().say)
    assert list(scratch.iterdir()) == []
    names = [one.name.split(",")[0] for one in found.operators]
    assert names[:4] == ["norm", "norm", "swiglu", "rotary positions and attention"]
    assert {"self_attn.q_proj", "mlp.down_proj", "head and cross-entropy"} <= set(names)
    rounding = torch.finfo(getattr(torch, compute)).eps
    for one in found.operators:
        assert one.error <= 2 * one.reference_error + rounding, one
        assert one.seconds > 0
        assert one.bytes > 0
    assert sum(found.documents) % 64 == 0
    assert "| swiglu |" in markdown(kernels_report(found, "tiny"))


def test_the_data_line(tiny_run: Said, scratch: Path) -> None:
    found = measure_data(config(tiny_run), 5, Heard().say)
    assert list(scratch.iterdir()) == []
    assert found.prepared.samples == 22
    assert found.prepared.bytes == Path(str(tiny_run["data"]["train"])).stat().st_size
    assert [line.batching for line in found.lines] == list(ARRANGE)
    assert len({line.tokens for line in found.lines}) == 1  # the same samples in each way
    assert all(line.steps == 5 and line.tokens <= line.computed for line in found.lines)
    assert "| pack |" in markdown(data_report(found, "tiny"))


def test_checkpoints(tiny_run: Said, scratch: Path) -> None:
    found = measure_checkpoint(config(tiny_run), 3, Heard().say)
    assert list(scratch.iterdir()) == []
    assert len(found.rounds) == 3
    for one in found.rounds:
        assert 0 < one.blocked < one.total
        assert one.copy > 0
        assert one.torch_save > 0
    assert found.bytes > 3 * 4 * 3456  # the adapter and both moments, in float32
    assert "| torch.save: training waits |" in markdown(checkpoint_report(found, "tiny"))
