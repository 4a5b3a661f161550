"""`bench` as a person runs it: its report, a user's mistakes in one line, and Ctrl-C."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from glm_accelerate.bench.compare import Side, compare, compare_report
from glm_accelerate.bench.report import markdown
from glm_accelerate.config.load import load_config
from tests.warm import Warm

VERB = [sys.executable, "-m", "glm_accelerate.cli.main", "bench"]


@pytest.fixture
def config(tiny_run: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_run))
    return path


@pytest.fixture
def bench(place: Path, warm: Callable[..., Warm]) -> Callable[..., Warm]:
    """bench(*words): in an empty directory, with its temporary files where they can be counted."""
    return lambda *words, **how: warm("bench", *words, cwd=place, env=surroundings(place), **how)


def surroundings(place: Path) -> dict[str, str]:
    inductor = str(place.parents[1] / "inductor")  # torch makes this directory whether or not it compiles
    own = {"TMPDIR": str(place), "TORCHINDUCTOR_CACHE_DIR": inductor, "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, "COLUMNS": "160"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    made = tmp_path / "here"
    made.mkdir()
    return made


def test_steps_are_measured_shown_and_written(config: Path, place: Path, bench: Callable[..., Warm]) -> None:
    words = ["step", str(config), "optim.clip=0.5", "--steps", "3", "--warmup", "1"]
    done = bench(*words, "--out", str(place / "out")).done()
    assert done.returncode == 0, done.stderr
    assert "Training steps of tiny" in done.stdout
    assert "matrix products" in done.stdout
    assert "measuring" in done.stderr
    assert sorted(path.name for path in place.rglob("*")) == [
        "bench-step.json",
        "bench-step.md",
        "bench-step.svg",
        "out",
    ]
    figures = json.loads((place / "out/bench-step.json").read_text())
    assert len(figures["steps"]) == 3
    assert figures["recompilations"] == 0
    assert figures["tokens_per_second"] > 0


def test_a_comparison_measures_what_the_verb_measures(
    config: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One round, where a person gets three at least."""
    for name, value in surroundings(place).items():
        monkeypatch.setenv(name, value)
    sides = tuple(
        Side(method, load_config(config, [f"adapt.method={method}"])) for method in ("lora", "full")
    )
    command = [*VERB, "step", "--json", "--steps", "1", "--warmup", "1"]
    found = compare((sides[0], sides[1]), 1, command, lambda what, done, total: None)
    assert [[side["method"] for side in pair] for pair in found] == [["lora", "full"]]
    shown = markdown(compare_report((sides[0], sides[1]), found))
    assert "| tokens a second |" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["step", "CONFIG", "optim.clipp=1"], "did you mean `clip`"),
        (["step", "no-such.yaml"], "no-such.yaml: cannot be read"),
        (["step", "CONFIG", "data.train=gone.jsonl"], "gone.jsonl"),
        (["data", "CONFIG", "model.path=gone"], "gone"),
        (["step", "CONFIG", "--compare", "adapt.method=fulll"], "fulll"),
        (["data", "CONFIG", "--compare", "adapt.method=full"], "--compare is for `bench step`"),
        (["step", "CONFIG", "--rounds", "1"], "1 is not a whole number from 3 on"),
        (["speed", "CONFIG"], "invalid choice: 'speed'"),
        (["step"], "a config is needed"),
    ],
)
def test_a_mistake_is_one_line(config: Path, bench: Callable[..., Warm], words: list[str], said: str) -> None:
    done = bench(*(str(config) if word == "CONFIG" else word for word in words)).done()
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert said in lines[0]
    assert "Traceback" not in done.stderr


def test_a_child_that_cannot_be_measured_has_said_why(config: Path, bench: Callable[..., Warm]) -> None:
    words = ["step", str(config), "--compare", "data.train=gone.jsonl"]
    done = bench(*words, "--steps", "1", "--warmup", "1").done()
    assert done.returncode == 2
    assert done.stderr.count("error:") == 1
    assert "gone.jsonl" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["step"], marks=pytest.mark.prove),
        ["step", "--compare", "adapt.method=full"],
        ["checkpoint"],
    ],
    ids=str,
)
def test_ctrl_c_leaves_nothing_behind(
    config: Path, place: Path, words: list[str], bench: Callable[..., Warm]
) -> None:
    more = [str(config), *words[1:], "--steps", "1000000", "--rounds", "1000000"]
    running = bench(words[0], *more, group=True)  # a terminal's Ctrl-C reaches all of its processes
    running.read_until("saving" if words == ["checkpoint"] else "measuring")
    time.sleep(0.2)
    os.killpg(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=120)
    assert running.returncode == 75, err
    assert out == ""
    assert "Traceback" not in err
    assert "stopped" in err
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("layout", ["parallel.shard=full", "parallel.tensor=2"])
def test_ranks_are_measured_beside_what_was_foretold(
    layout: str, config: Path, place: Path, bench: Callable[..., Warm]
) -> None:
    words = ["step", str(config), layout, "--nproc", "2", "--steps", "3", "--warmup", "1", "--json"]
    done = bench(*words).done()
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["axes"] == ("shard 2" if "shard" in layout else "tensor 2")
    assert len(figures["ranks"]) == 2
    assert len(figures["steps"]) == 3
    assert all(one["memory_bytes"] > 0 for one in figures["ranks"])
    assert figures["step_seconds"] == max(one["step_seconds"] for one in figures["ranks"])
    assert figures["foretold_seconds"] > 0
    assert figures["foretold_bytes"] > 0
    assert list(place.iterdir()) == []


def test_ranks_that_cannot_share_the_model_say_so_once(config: Path, bench: Callable[..., Warm]) -> None:
    done = bench("step", str(config), "parallel.tensor=3", "--nproc", "2").done()
    assert done.returncode == 2
    assert done.stderr.count("parallel.tensor") >= 1
    assert "Traceback" not in done.stderr
    assert bench("data", str(config), "--nproc", "2").done().returncode == 2
