"""`doctor --save` and `doctor --compare`, as commands."""

import json
from pathlib import Path

import pytest
import torch

from glm_accelerate.cli import machine
from glm_accelerate.cli.main import main


@pytest.fixture
def saved(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "250")  # no line of a table is broken
    file = tmp_path / "here.json"
    assert main(["doctor", "--save", str(file)]) in (0, 2)
    assert f"saved: {file}" in capsys.readouterr().out
    return file


def changed(file: Path, **facts: str | None) -> Path:
    """A copy in which these facts are others, or missing."""
    content = json.loads(file.read_text())
    content["facts"] |= facts
    content["facts"] = {name: value for name, value in content["facts"].items() if value is not None}
    other = file.with_name("other.json")
    other.write_text(json.dumps(content))
    return other


def test_a_machine_is_like_itself(
    saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = machine.read(saved)
    assert facts["torch"] == torch.__version__
    assert {"python", "transformers", "processor", "vectors", "device", "memory", "/dev/shm"} <= set(facts)
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert main(["doctor", "--compare", str(saved)]) == 0
    assert capsys.readouterr().out == f"alike in all of {len(facts)} facts\n"
    assert main(["doctor", "--compare", str(saved), str(saved)]) == 0


def test_only_what_differs_is_shown_and_what_changes_results_first(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = machine.read(saved)
    fewer = " ".join(facts["instructions"].split()[1:])
    other = changed(saved, torch="2.0", driver="1.2.3", instructions=fewer, python=None)
    assert main(["doctor", "--compare", str(saved), str(other)]) == 4
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[0] for line in lines[1:3]) == ["instructions", "torch"]
    assert sorted(line.split()[0] for line in lines[3:5]) == ["driver", "python"]
    assert all("change: " in line for line in lines[1:3])
    assert all(line.rstrip().endswith("the same") for line in lines[3:5])
    assert facts["instructions"].split()[0] in next(line for line in lines if line.startswith("instructions"))
    assert lines[5:] == ["2 of 4 differences can change results"]


def test_this_machine_is_laid_beside_a_file(
    saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    assert main(["doctor", "--compare", str(saved)]) == 4
    out = capsys.readouterr().out
    assert "this machine" in out.splitlines()[0]
    assert out.splitlines()[1].split()[:3] == ["$NVIDIA_TF32_OVERRIDE", "none", "1"]


@pytest.mark.parametrize("text", ["", "[]", '{"facts": {}}', '{"made_by": "glm-accelerate doctor"}'])
def test_another_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    assert main(["doctor", "--compare", str(tmp_path / "a.json")]) == 2
    assert "is no file of `doctor --save`" in capsys.readouterr().err


def test_compare_stands_alone(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--compare", "no.json"]) == 2
    assert "no.json: cannot be read" in capsys.readouterr().err
    assert main(["doctor", "--compare", str(saved), "--save", "b.json"]) == 2
    assert main(["doctor", "--compare", *[str(saved)] * 3]) == 2
    assert "has 3 files, expected one or two" in capsys.readouterr().err


def test_a_program_that_is_missing_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(machine.commit().split(",")[0]) in (0, 40)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert machine.compiled_by() == ""
