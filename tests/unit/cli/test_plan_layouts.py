"""`plan --gpus N --nodes M`: which layout is best, why the others lose, and what fits where nothing does."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from glm_accelerate.cli.main import main
from glm_accelerate.demo.tiny import Size, write_tiny

WIDTH = 80
GQA = {"num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151552}
MODELS: dict[str, dict[str, Any]] = {
    "glm-4-9b": GQA
    | {"hidden_size": 4096, "num_hidden_layers": 40, "intermediate_size": 13696, "num_attention_heads": 32},
    "glm-4-32b": GQA
    | {"hidden_size": 6144, "num_hidden_layers": 61, "intermediate_size": 23040, "num_attention_heads": 48},
    # In the shape of what we train: its norms and its biases are others, a ten-thousandth of the weights.
    "glm-130b": {"hidden_size": 12288, "num_hidden_layers": 70, "intermediate_size": 32768, "head_dim": 128}
    | {
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "vocab_size": 150528,
        "tie_word_embeddings": True,
    },
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config a model, of which only config.json and the tokenizer are there; 128 answers, some long."""
    words = [f"w{number}" for number in range(40)]
    tiny = Size(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48)
    drawn = random.Random(0)
    lines = (
        {
            "messages": [
                {"role": "user", "content": "w1"},
                {
                    "role": "assistant",
                    "content": " ".join(drawn.choices(words, k=drawn.choice((80, 400, 1500)))),
                },
            ]
        }
        for _ in range(128)
    )
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, sizes in MODELS.items():
        model = write_tiny(tmp_path / name, words, size=tiny)
        (model / "model.safetensors").unlink()
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32768} | sizes))
        run = {
            "model": {"path": name},
            "adapt": {"method": "full"},
            "data": {"train": "train.jsonl", "cache": "cache", "workers": 1},
            "train": {"step_samples": 64, "epochs": 50},
        }
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(run))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *words: str, code: int) -> str:
    assert main(["plan", *words]) == code
    return capsys.readouterr().out


def layouts(capsys: pytest.CaptureFixture[str], *words: str, code: int) -> dict[str, Any]:
    return json.loads(shown(capsys, *words, "--json", code=code))["layouts"]


def planned(capsys: pytest.CaptureFixture[str], *words: str, code: int) -> tuple[str, dict[str, Any]]:
    return shown(capsys, *words, code=code), layouts(capsys, *words, code=code)


def sizes_of(found: dict[str, Any]) -> tuple[int, ...]:
    layout = found["layout"]
    return tuple(layout[axis] for axis in ("data", "shard", "context", "tensor", "pipeline"))


def of_layouts(text: str) -> list[str]:
    """The lines about layouts, but for what is typed."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("layouts of"))
    ends = (number for number, line in enumerate(lines) if line.startswith(("to type", "taken already")))
    return lines[start : next(ends, len(lines))]


def test_nine_billion_on_eight_cards_without_nvlink(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Full fine-tuning: divided by FSDP alone it does not fit, as embedding and head are gathered whole."""
    text, found = planned(capsys, "glm-4-9b.yaml", "--gpu", "RTX 4090", "--gpus", "8", code=2)
    lines = of_layouts(text)
    assert lines[:2] == ["layouts of 8 RTX 4090", "PCIe 16 GB/s"]
    assert max(map(len, lines)) <= WIDTH
    best = found["fitting"][0]
    assert sizes_of(best) == (1, 1, 1, 1, 8)  # what stages hand on is little
    typed = text.partition("\nto type ")[2].splitlines()[0].split()
    assert typed[:2] == ["parallel.pipeline=8", "parallel.shard=off"]
    typed = ["glm-4-9b.yaml", "--gpu", "RTX 4090", "--gpus", "8", *typed]
    assert "\nit fits: " in shown(capsys, *typed, code=0)
    assert best["needed"] <= best["room"] < found["own"]["needed"]
    assert any(line.split()[:6] == [f"{n}*", "1", "8", "1", "1", "1"] for n, line in enumerate(lines[2:], 0))
    assert "does not fit: " in text
    assert "sums of products wait for PCIe" in text
    assert "as fast as data parallel alone, which does not fit" in text


def test_lora_of_nine_billion_needs_no_sums_of_products(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("glm-4-9b.yaml", "--gpu", "RTX 4090", "--gpus", "8", "adapt.method=lora")
    text, found = planned(capsys, *words, code=0)
    best, *_ = found["fitting"]
    whole = next(one for one in found["fitting"] if sizes_of(one) == (8, 1, 1, 1, 1))
    assert best["layout"]["tensor"] == 1
    assert 0 < whole["layout"]["recompute"] < 1  # of each copy no more than it must
    assert (
        whole["time"]["seconds"] < found["own"]["time"]["seconds"]
    )  # the plan divides a model that is large
    starred = [line.split() for line in of_layouts(text) if line.split()[0].endswith("*")]
    assert [row[1:6] for row in starred] == [["1", "8", "1", "1", "1"]]
    assert "by the step of the layout with a star" in text.replace("\n", " ")


def test_open_sizes_are_those_of_the_best_line_that_the_others_allow(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def chosen(*words: str) -> tuple[tuple[int, ...], str, dict[str, Any]]:
        every = [f"parallel.{axis}=auto" for axis in ("tensor", "pipeline", "context")]
        typed = ["plan", "glm-4-9b.yaml", "--gpu", "RTX 4090", "--gpus", "8", *every, *words, "--json"]
        assert main(typed) == 0
        plan = json.loads(capsys.readouterr().out)
        why = next(reason["why"] for reason in plan["reasons"] if reason["name"] == "layout")
        tensor, pipeline = plan["tensor"] * plan["query"], max(1, len(plan["stages"]))
        found = (8 // tensor // pipeline // plan["shards"], plan["shards"], plan["context"], tensor, pipeline)
        assert plan["memory"]["needed"] <= plan["memory"]["room"]
        return found, why, plan

    sizes, why, plan = chosen()
    best, second, *_ = plan["layouts"]["fitting"]
    assert sizes == sizes_of(best) == sizes_of(plan["layouts"]["own"])
    assert plan["micro_tokens"] == best["layout"]["micro_tokens"]
    ratio = second["time"]["seconds"] / best["time"]["seconds"]
    assert f"next tensor 2 x pipeline {second['layout']['pipeline']}, x {ratio:.2f}: " in why
    two, _, plan = chosen("parallel.tensor=2")
    asked = [one for one in plan["layouts"]["fitting"] if one["layout"]["tensor"] == 2]
    assert two == sizes_of(asked[0]) != sizes


def test_thirty_two_billion_on_eight_large_cards(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = layouts(capsys, "glm-4-32b.yaml", "--gpu", "A100 80GB", "--gpus", "8", code=2)
    best, own = found["fitting"][0], found["own"]
    assert own["needed"] > own["room"]  # FSDP alone, by the gathered embedding and head
    assert best["layout"]["tensor"] > 1
    assert not any(sent["network"] for sent in best["time"]["traffic"])


def test_thirty_two_billion_on_sixteen_small_cards(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("glm-4-32b.yaml", "--gpu", "V100", "--gpus", "16", "--nodes", "2")
    text, found = planned(capsys, *words, code=2)
    assert "network 100 Gbit/s a node (assumed)" in text
    assert "no layout fits: the least needs " in text
    assert found["overrides"] == ["adapt.method=lora"]
    assert "\nwith adapt.method=lora:\n" in text
    best = found["fitting"][0]
    assert best["layout"]["tensor"] <= 8
    assert best["needed"] <= best["room"]


def test_glm_130b_on_sixteen(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its state in full are 2.1 TB: it says so, and what fits, beside data parallel alone."""
    words = ("glm-130b.yaml", "--gpu", "A100 40GB", "--gpus", "16", "--nodes", "2", "--link", "200Gbit")
    text, found = planned(capsys, *words, code=2)
    assert found["state"] == pytest.approx(2.06e12, rel=0.01)
    assert "\nweights, gradients and moments alone are 1.87 TiB\n" in text
    assert "no layout fits: " in text
    assert "network 200 Gbit/s a node (--link)" in text
    assert found["overrides"] == ["adapt.method=lora"]
    best, alone = found["fitting"][0], found["alone"]
    assert best["layout"]["pipeline"] > 1
    assert best["layout"]["tensor"] * best["layout"]["shard"] > 1
    assert sizes_of(alone) == (1, 16, 1, 1, 1)
    ratio = alone["time"]["seconds"] / best["time"]["seconds"]
    assert ratio > 1
    assert f"x {ratio:.2f} as fast as data parallel alone" in text
    assert max(map(len, of_layouts(text))) <= WIDTH


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus", "12", "--nodes", "8"], "12 devices are not 8 equal nodes"),
        (["--gpus", "8", "--link", "fast"], "fast is not a rate as 100Gbit"),
        (["--gpus", "8", "--nodes", "0"], "0 is not a whole number from 1 on"),
    ],
)
def test_mistakes_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["plan", "glm-4-9b.yaml", "--gpu", "A100", *words]) == 2
    assert said in capsys.readouterr().err
