"""`data CONFIG`, run as a user runs it: what it prints, in colour and without, and what it refuses."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from glm_accelerate.cli.data import render, visible
from glm_accelerate.cli.main import main
from glm_accelerate.cli.progress import Lines
from glm_accelerate.data.tokenizers import load_tokenizer
from glm_accelerate.data.types import FilePlace, Sample
from glm_accelerate.demo.tiny import Size, write_tiny


def talk(question: str, answer: str) -> str:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": turns}, ensure_ascii=False) + "\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    model = write_tiny(tmp_path / "model", ["hello", " world"], size=Size(hidden=32, layers=1, ffn=32))
    train = [talk(f"ask {i}", f"say {i}" * (i + 1)) for i in range(40)]
    train[5] = talk("why?", "because " * 400)
    train[9] = '{"messages": oops}\n'
    (tmp_path / "train.jsonl").write_text("".join(train))
    (tmp_path / "dev.jsonl").write_text(talk("new", "answer") + train[7])
    said = {
        "model": {"path": str(model)},
        "data": {
            "train": str(tmp_path / "train.jsonl"),
            "dev": str(tmp_path / "dev.jsonl"),
            "max_tokens": 300,
            "overlong": "drop",
            "skip_bad": 1,
            "cache": str(tmp_path / "cache"),
        },
        "train": {"step_samples": 4},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(said))  # JSON is YAML
    return tmp_path / "run.yaml"


def test_everything_is_said(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", str(config), "--line", "3"]) == 0
    said = capsys.readouterr().out
    train = config.parent / "train.jsonl"

    assert "38 samples" in said
    assert "1 left out, 1 lines unreadable" in said
    assert re.search(rf"train: 1 too long; data\.max_tokens=(\d+) loses nothing\n  {train}:6 ", said)
    assert f"train: 1 unreadable\n  {train}:10 broken JSON" in said
    assert "1 of 2 dev samples are also training samples" in said
    assert f"dev.jsonl:2 = {train}:8" in said
    for way in ("pad, batch 1 ", "pad, batch 4", "pad, batch 16", "bucket", "pack"):
        assert f"\n{way}" in said
    assert "<- this config" in next(line for line in said.splitlines() if line.startswith("pack"))
    assert "steps of 4 samples" in said
    bars = [line for line in said.splitlines() if " - " in line and line.strip()[0].isdigit()]
    assert sum(int(line.split()[-1]) for line in bars) == 38
    # The line end after the role token and the stop token are learnt; without colour they are marked.
    assert f"Sample 2  {train}:3" in said
    assert said.endswith("[gMASK]<sop><|user|>\nask 2<|assistant|>⟦↵\nsay 2say 2say 2<|user|>⟧\n")
    assert "\x1b" not in said


def test_a_sample_by_its_number(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", str(config), "--sample", "5"]) == 0
    said = capsys.readouterr().out
    assert f"Sample 5  {config.parent / 'train.jsonl'}:7" in said, "line 6 was left out"
    assert "ask 6<|assistant|>" in said


def test_dev_that_shares_nothing(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (config.parent / "dev.jsonl").write_text(talk("new", "answer"))
    assert main(["data", str(config)]) == 0
    assert "No dev sample is also a training sample." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--sample", "38"], "there is no training sample 38 (0 to 37)"),
        (["--sample", "-1"], "there is no training sample -1"),
        (["--line", "6"], "train.jsonl:6: no sample came from this line"),
        (["--line", "other.jsonl:3"], "`other.jsonl` is not a training file (one of train.jsonl)"),
        (["--line", "three"], "`three` is not a line"),
        (["data.skip_bad=0"], "train.jsonl:10"),
    ],
)
def test_what_is_refused_is_one_line(
    config: Path, capsys: pytest.CaptureFixture[str], words: list[str], complaint: str
) -> None:
    assert main(["data", str(config), *words]) == 2
    said = capsys.readouterr()
    assert complaint in said.err
    assert said.err.count("\n") == 1


def test_a_line_of_a_named_file(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = config.parent / "more.jsonl"
    more.write_text(talk("first", "one") + talk("second", "two"))
    said = json.loads(config.read_text())
    said["data"]["train"] = [said["data"]["train"], {"path": str(more), "weight": 2.0}]
    config.write_text(json.dumps(said))
    assert main(["data", str(config), "--line", "more.jsonl:2"]) == 0
    out = capsys.readouterr().out
    assert f"Sample 39  {more}:2" in out
    assert f"{more}, weight 2\n" in out


def test_targets_stand_out_in_colour(config: Path) -> None:
    tokenizer = load_tokenizer(config.parent / "model")
    tokens = [*tokenizer.encode(["ask"])[0], tokenizer.special("<|user|>")]
    learnt = np.array([False] * (len(tokens) - 1) + [True])
    sample = Sample(np.array(tokens, np.int32), learnt, FilePlace("a", 1))
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard")
    with console.capture() as capture:
        console.print(render(sample, tokenizer, coloured=True))
    assert capture.get() == "ask\x1b[1;32m<|user|>\x1b[0m\n"


def test_data_cannot_command_the_terminal() -> None:
    assert visible("a\x1b[2Jb\rc\x7f\n\t") == "a␛[2Jb␍c␡\n\t"
    assert visible("[bold]中\x9b2J") == "[bold]中\N{REPLACEMENT CHARACTER}2J"


def test_progress_in_a_log_is_lines_with_rate_and_time_left() -> None:
    console = Console(file=io.StringIO(), width=40)
    lines = Lines(console, seconds=0.0)
    lines("train", 0, 4_000_000)
    lines("train", 1_000_000, 4_000_000)
    with console.capture() as capture:
        lines("train", 2_000_000, 4_000_000)
    assert capture.get().startswith("preparing train: 1.91 MiB of 3.81 MiB, ")
    assert capture.get().endswith(" left\n")
    assert capture.get().count("\n") == 1


@pytest.mark.process
def test_chinese_names_work_in_a_locale_without_utf8(config: Path) -> None:
    said = json.loads(config.read_text())
    for section, key, name in (("model", "path", "模型"), ("data", "train", "数据.jsonl")):
        said[section][key] = str(Path(said[section][key]).rename(config.parent / name))
    (config.parent / "我的.yaml").write_text(json.dumps(said, ensure_ascii=False), encoding="utf-8")
    ascii_only = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    words = [sys.executable, "-m", "glm_accelerate.cli.main", "data", str(config.parent / "我的.yaml")]
    answer = subprocess.run(words, env=os.environ | ascii_only, capture_output=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert "数据.jsonl" in answer.stdout.decode()
