"""A run takes its memory at its start: whole runs with and without a rehearsal, and what malloc counts."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # `benchmarks` is no installed package

from benchmarks.memory import flat, live  # noqa: E402
from glm_accelerate.checkpoint.read import Reader  # noqa: E402
from glm_accelerate.config.schema import RunConfig  # noqa: E402
from glm_accelerate.observe.events import read_events  # noqa: E402
from glm_accelerate.training import build  # noqa: E402
from glm_accelerate.training.run import train  # noqa: E402
from glm_accelerate.training.step import WholeModel  # noqa: E402

Said = dict[str, Any]
COMPILES = pytest.mark.skipif(shutil.which("cc") is None, reason="the counter is compiled with cc")


def state(run: Path, step: int) -> dict[str, torch.Tensor]:
    reader = Reader(run / "checkpoints" / f"checkpoint-{step}")
    return {**reader.group("weights"), **reader.group("optimizer")}


def rehearsals(run: Path) -> list[tuple[int, str]]:
    events = [event for event in read_events(run / "events.jsonl") if event["kind"] == "decision"]
    return [(event["step"], event["said"]) for event in events if "largest pass" in str(event["said"])]


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_rehearsed_run_is_the_same_to_the_last_bit(
    method: str, tiny_run: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig.model_validate({**tiny_run, "adapt": {"method": method}})
    rehearsed = train(config, tmp_path / "rehearsed")
    assert [step for step, _ in rehearsals(tmp_path / "rehearsed")] == [0]
    monkeypatch.setattr(build, "rehearsal", lambda *_: None)
    plain = train(config, tmp_path / "plain")
    assert rehearsals(tmp_path / "plain") == []
    assert rehearsed.losses == plain.losses
    one, other = (state(tmp_path / name, 14) for name in ("rehearsed", "plain"))
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.filterwarnings("default:put_")
def test_an_operator_that_cannot_repeat_is_met_before_the_first_step_and_named(
    tiny_run: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """As on a GPU, where a run asks torch for deterministic forms alone; put_ has none on a CPU either."""
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    torch.use_deterministic_algorithms(True)

    real = WholeModel.__call__

    def one_that_cannot(self: WholeModel, *given: Any) -> torch.Tensor:
        torch.zeros(4).put_(torch.tensor([1]), torch.ones(1))
        return real(self, *given)

    monkeypatch.setattr(WholeModel, "__call__", one_that_cannot)
    train(RunConfig.model_validate(tiny_run), tmp_path / "run")
    warned = [
        event["said"] for event in read_events(tmp_path / "run/events.jsonl") if event["kind"] == "warning"
    ]
    assert [said for said in warned if "put_ does not have a deterministic implementation" in str(said)]


def test_a_resumed_run_rehearses_what_is_left(tiny_run: Said, tmp_path: Path) -> None:
    config = RunConfig.model_validate(tiny_run)
    train(config, tmp_path / "run", stop_after=5)
    train(config, tmp_path / "run")
    (first, _), (second, said) = rehearsals(tmp_path / "run")
    assert (first, second) == (0, 5)
    assert int(said.partition("of step ")[2].partition(";")[0]) > 5


COUNTING = """
import torch
from benchmarks.memory.live import Course, live_now
course = Course()
course.begin()
before = live_now()
kept = torch.zeros(2_000_000)
torch.zeros(5_000_000)
course.step()
course.step()
print(course.live[0] - before, course.live[1] - before, live_now() - before, course.high[0])
"""


def environment(counter: Path) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return {**os.environ, "LD_PRELOAD": str(counter), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


@COMPILES
@pytest.mark.bench
def test_the_counter_counts_what_lives(tmp_path: Path) -> None:
    counter = live.build_counter(tmp_path)
    command = [sys.executable, "-c", COUNTING]
    said = subprocess.run(command, env=environment(counter), capture_output=True, text=True, check=True)
    peak, later, now, high = map(int, said.stdout.split())
    assert 28e6 <= peak < 29e6  # both tensors at once
    assert 8e6 <= later < 9e6  # one is gone
    assert 8e6 <= now < 9e6
    assert high > peak


RUN = """
import json, sys
from pathlib import Path
import torch
from benchmarks.memory.flat_ours import Scale
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.training.run import train
torch.set_num_threads(1)
scale = Scale()
train(RunConfig.model_validate(json.loads(sys.argv[1])), Path(sys.argv[2]), observers=[scale])
print(json.dumps({"live": scale.course.live, "said": scale.said}))
"""


@COMPILES
def test_nothing_grows_after_the_first_step(tiny_run: Said, tmp_path: Path) -> None:
    """In float32: products of other types have kernels of their own for each shape."""
    data = tmp_path / "long.jsonl"
    flat.draw_conversations(data, count=160, median=20, seed=1)
    said = {
        **tiny_run,
        "data": {"train": str(data), "max_tokens": 1024, "workers": 1, "cache": str(tmp_path / "cache")},
        "train": {"steps": 40, "step_samples": 4},
        "precision": {"compute": "float32", "compile": "off"},
        "checkpoint": {"every": 40},
    }
    command = [sys.executable, "-c", RUN, json.dumps(said), str(tmp_path / "run")]
    counter = live.build_counter(tmp_path)
    done = subprocess.run(command, env=environment(counter), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert any("largest pass fits" in each for each in found["said"])
    peaks = np.array(found["live"])
    assert len(peaks) == 40
    assert max(peaks[1:]) <= peaks[0] + 2**20
    assert max(peaks) - min(peaks) > 2**22  # the samples are long-tailed enough for that to say something


@COMPILES
@pytest.mark.bench
@pytest.mark.prove
def test_the_benchmark_weighs_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tiny", "--steps", "6", "--batch", "2", "--max-tokens", "128", "--threads", "1"]
    flat.main([*words, "--out", str(tmp_path)])
    (written,) = tmp_path.glob("*-memory-flat-lora.json")
    for side in ("stock", "ours"):
        measured = flat.Side(**json.loads(written.read_text())[side])
        assert len(measured.live) == len(measured.high) == len(measured.resident) == 6
        assert min(measured.alive) > 0
    shown = capsys.readouterr().out
    assert "| alive: steps in which the peak grew |" in shown
    assert written.with_suffix(".md").read_text() in shown
    assert written.with_suffix(".svg").read_text().count("<polyline") == 4


def test_growth_is_counted_from_records() -> None:
    mega = 2**20
    found = flat.peaks([10 * mega, 5 * mega, 10 * mega + 5, 12 * mega, 11 * mega, 14 * mega])
    assert (found.first, found.later, found.grew, found.last_growth) == (10 * mega, 14 * mega, 2, 6)
    assert found.swing == 14 / 5
    assert flat.peaks([8, 4, 7]).grew == 0
