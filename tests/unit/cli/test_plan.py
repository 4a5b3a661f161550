import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import yaml

from glm_accelerate.cli.main import main

WIDTH = 100


@pytest.fixture
def folder(tiny_run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `我的.yaml` lies, which trains `模型`: 24 layers as wide as GLM-4-9B's."""
    model = Path(tiny_run["model"]["path"])
    sizes = {"hidden_size": 4096, "num_hidden_layers": 24, "intermediate_size": 13696, "vocab_size": 151552}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128}
    config = model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | sizes | heads))
    model.rename(tmp_path / "模型")
    (tmp_path / "我的.yaml").write_text(
        yaml.safe_dump(tiny_run | {"model": {"path": "模型"}}), encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    return tmp_path


def plan(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["plan", "我的.yaml", *words]) == code
    shown = capsys.readouterr()
    assert shown.err == "" or shown.err.startswith("measuring ")
    return shown.out


def columns(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in line)


def test_what_fits_is_said_with_time_and_cost(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = plan(capsys, "--gpu", "RTX 4090", "--price", "3")
    assert "\nit fits: " in out
    assert "of 23.5 GiB free on RTX 4090\n" in out
    assert "40% of 165.2 TFLOP/s, assumed" in out
    assert "\ncost 0." in out
    assert "ladder" not in out
    assert " MB each" not in out  # one kind of unit
    for name in (
        "parameters",
        "optimizer",
        "activations",
        "of a device",
        "of the host",
        "on disk",
    ):
        assert f"\n{name} " in out
    assert max(map(columns, out.splitlines())) <= WIDTH


def test_what_does_not_fit_comes_with_the_ladder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = plan(capsys, "--gpu", "8GiB", "adapt.method=full", "memory.recompute=off", "--gpus", "2", code=2)
    *table, command = out.splitlines()
    assert max(map(columns, table)) <= WIDTH
    assert "it does not fit: " in out
    assert "8 GiB free on a device of 8GiB" in out
    assert "time unknown" in out
    ladder = [
        line.split()[0] for line in table[table.index(next(t for t in table if "the ladder" in t)) + 1 :]
    ]
    assert {"adapt.method=lora", "adapt.base=nf4", "--gpus"} <= set(ladder)
    assert command.startswith("glm-accelerate plan 我的.yaml ")
    assert "adapt.method=full" not in command  # what is replaced is said once
    assert "adapt.method=lora" in command
    assert command.count("--gpus") == 1


def test_json_has_the_items_the_time_and_the_advice(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = json.loads(plan(capsys, "--gpu", "6GiB", "--json", "--tokens-per-second", "100", code=2))
    assert {"what", "bytes", "why", "where"} == set(said["memory"]["items"][0])
    assert said["time"]["seconds"] == pytest.approx(said["time"]["tokens"] / 100)
    assert "measured" in said["time"]["why"]
    assert said["advice"]["overrides"]
    assert said["advice"]["bytes"] <= said["memory"]["room"] < said["memory"]["needed"]


def test_another_machine_takes_nothing_from_this_one(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/none")  # no compiler here
    said = json.loads(plan(capsys, "--gpu", "RTX 4090", "--gpus", "4", "--json"))
    why = {reason["name"]: reason["why"] for reason in said["reasons"]}
    assert why["ranks"] == "--gpus"
    assert why["device"] == "cuda, 32 cores assumed"
    assert why["compile"] == "not measured on cuda"
    assert why["compute"] == "this GPU multiplies it in hardware"


def test_a_limit_stands_in_the_place_of_a_card(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "GiB allowed by memory.limit\n" in plan(capsys, "memory.limit=90GiB")


@pytest.mark.parametrize("words", [["--gpus", "0"], ["--price", "dear"], ["--gpu", "显卡"]])
def test_mistakes_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(["plan", "我的.yaml", *words]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)


@pytest.mark.parametrize(
    ("word", "values", "wanted"),
    [
        ("--tokens-per-second", ["0", "-5", "nan", "inf", "many"], "above 0"),
        ("--price", ["-3", "nan", "inf", "free"], "from 0 on"),
    ],
)
def test_speed_and_price_are_numbers_that_can_be(
    word: str, values: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in values:
        assert main(["plan", "none.yaml", f"{word}={value}"]) == 2
        said = capsys.readouterr().err
        assert f"{word}: {value} is not a finite number {wanted}" in said.replace("\n", " ")


def test_what_costs_nothing_is_said_to(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "\ncost 0" in plan(capsys, "--price", "0", "--gpu", "RTX 4090")
