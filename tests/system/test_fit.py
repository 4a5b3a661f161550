"""A newcomer on a card that is too small: what is printed is typed, nothing else, until it fits."""

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from glm_accelerate.demo.tiny import Size, write_tiny
from tests.warm import Warm

Run = Callable[[list[str], Path], subprocess.CompletedProcess[str]]
NINE = {
    "hidden_size": 4096,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 13696,
    "vocab_size": 151552,
}
WIDTH = 100


@pytest.fixture
def run(warm: Callable[..., Warm]) -> Run:
    """run(words, folder)"""
    there = {"PATH": "/usr/bin:/bin", "COLUMNS": str(WIDTH), "GLM_ACCELERATE_OFFLINE": "1"}
    return lambda words, folder: warm(*words, cwd=folder, env=there).done()


@pytest.fixture
def newcomer(tiny_run: dict[str, Any], tmp_path: Path) -> Path:
    """A folder with `我的.yaml`: full fine-tuning of what has the sizes of GLM-4-9B."""
    model = Path(tiny_run["model"]["path"])
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | NINE))
    model.rename(tmp_path / "大 模型")
    said = {
        "model": {"path": "大 模型"},
        "adapt": {"method": "full"},
        "data": tiny_run["data"],
        "train": {"steps": 10},
    }
    (tmp_path / "我的.yaml").write_text(yaml.safe_dump(said, allow_unicode=True), encoding="utf-8")
    return tmp_path


def test_the_printed_advice_alone_makes_it_fit(newcomer: Path, run: Run) -> None:
    words = ["plan", "我的.yaml", "--gpu", "RTX 3060 12GB"]
    followed = 0
    while True:
        done = run(words, newcomer)
        assert done.stderr == ""
        if "\nit fits" in done.stdout:
            assert done.returncode == 0
            break
        assert done.returncode == 2
        assert "it does not fit" in done.stdout
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("glm-accelerate "))
        words = shlex.split(line)[1:]
        followed += 1
        assert followed < 4
    assert followed == 1
    assert words[:4] == ["plan", "我的.yaml", "--gpu", "RTX 3060 12GB"]
    assert "adapt.method=lora" in words
    said = json.loads(run([*words, "--json"], newcomer).stdout)
    assert said["memory"]["needed"] <= said["memory"]["room"] <= 12 << 30
    assert said["advice"] is None
    assert {"parameters", "gradients", "optimizer", "activations"} <= {
        item["what"] for item in said["memory"]["items"]
    }


def test_a_card_that_nobody_knows_is_refused_by_name(newcomer: Path, run: Run) -> None:
    done = run(["plan", "我的.yaml", "--gpu", "RTX 4900"], newcomer)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no device called `RTX 4900` is known (did you mean `RTX 4090`?" in done.stderr


def test_a_run_that_cannot_fit_is_refused_before_it_begins_and_its_cure_trains(
    tiny_run: dict[str, Any], tmp_path: Path, run: Run
) -> None:
    words = ["red", "green", "blue", "white", "black", "sky"]
    size = Size(hidden=128, layers=6, heads=4, kv_heads=2, head_dim=32, ffn=512)
    write_tiny(tmp_path / "wider", words, size=size)
    tiny_run["model"] = {"path": str(tmp_path / "wider")}
    tiny_run["train"] = {"steps": 2, "step_samples": 20, "micro_tokens": 1024}
    tiny_run["memory"] = {"recompute": "off"}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(tiny_run))
    planned = json.loads(run(["plan", "my.yaml", "--json"], tmp_path).stdout)
    limit = f"memory.limit={(planned['memory']['needed'] - 1) >> 20}MiB"
    refused = run(["train", "my.yaml", limit, "--run", "run"], tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    (line,) = refused.stderr.splitlines()
    assert "does not fit: a step needs" in line
    cure, _, rest = line.partition(" (")[2].partition(" needs ")
    assert "to try it anyway" in rest
    done = run(["train", "my.yaml", limit, *shlex.split(cure), "--run", "run"], tmp_path)
    assert done.returncode == 0, done.stderr
    anyway = next(word for word in rest.split() if word.startswith("memory.limit="))
    done = run(["train", "my.yaml", anyway, "--run", "another"], tmp_path)
    assert done.returncode == 0, done.stderr
