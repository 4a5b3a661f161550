"""`benchmarks/gpu.sh --tiny`: what runs on a GPU machine, at tiny size on the CPU, from the bare checkout."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.bench
ROOT = Path(__file__).resolve().parents[2]
TRAINING = ["lora-4096", "lora-6000", "lora-1024", "qlora", "full", "lora-all", "fp8"]
SAME = ("tokens", "targets", "trained")  # on both sides
Findings = list[dict[str, Any]]


def gpu_script(
    out: Path, hidden: Path, *words: str, tiny: bool = True
) -> tuple[subprocess.CompletedProcess[str], Findings]:
    """Modules in `hidden` stand before the installed ones."""
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHON": sys.executable,
        "PYTHONPATH": str(hidden),
        "OUT": str(out),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks/gpu.sh"), *(["--tiny"] if tiny else []), *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    written = out / "gpu-tiny.jsonl"
    lines = written.read_text().splitlines() if written.exists() else []
    return done, [json.loads(line) for line in lines]


def figures(findings: Findings, start: str) -> list[dict[str, Any]]:
    return [finding["figures"] for finding in findings if finding["part"].startswith(start)]


@pytest.fixture
def hidden(tmp_path: Path) -> Path:
    """Our own dependencies that a machine may lack."""
    made = tmp_path / "hidden"
    made.mkdir()
    for module in ("pydantic", "sentencepiece", "rich"):
        (made / f"{module}.py").write_text(f"raise ImportError('no {module} here')\n")
    return made


def test_checks_and_training_need_none_of_our_dependencies(tmp_path: Path, hidden: Path) -> None:
    words = ["machine", "parity", "operators", "lora-1024 ours", "lora-1024 stock"]
    done, findings = gpu_script(tmp_path / "out", hidden, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    (mine, _), (theirs,) = figures(findings, "lora-1024 ours"), figures(findings, "lora-1024 stock")
    assert [mine[key] for key in SAME] == [theirs[key] for key in SAME]
    assert len(figures(findings, "parity ")) == 4
    assert len(figures(findings, "operator ")) == 11
    assert figures(findings, "same gradients twice")[0]["of"] > 10
    measured = ("machine", "lora-1024 stock")  # where there is nothing to pass
    assert all(finding["ok"] for finding in findings if finding["part"] not in measured)


@pytest.mark.prove
def test_our_training_needs_none_of_our_dependencies(tmp_path: Path, hidden: Path) -> None:
    done, findings = gpu_script(tmp_path / "out", hidden, *(f"{case} ours" for case in TRAINING))
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(finding["ok"] for finding in findings)
    for case in TRAINING:
        found = figures(findings, f"{case} ours")
        assert len(found) == (1 if case == "full" else 2)
        for each in found:
            assert each["tokens_per_second"] > 0
            assert sum(each["breakdown"]["classes"].values()) == pytest.approx(each["breakdown"]["seconds"])
        # Recomputing saves memory and changes nothing that is learnt.
        assert found[0]["losses"] == pytest.approx(found[-1]["losses"], abs=0.01)
        assert found[0]["losses"][0] == pytest.approx(math.log(256), abs=0.2)
    (page,) = (tmp_path / "out").glob("*-gpu-tiny.md")
    assert "| lora-4096 ours, recompute off |" in page.read_text()


@pytest.mark.prove
def test_the_stock_way_learns_the_same_samples(tmp_path: Path, hidden: Path) -> None:
    words = ["lora-6000 ours", "lora-6000 stock", "full stock", "qlora stock"]
    done, findings = gpu_script(tmp_path / "out", hidden, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    mine, theirs = figures(findings, "lora-6000 ours"), figures(findings, "lora-6000 stock")
    assert [mine[0][key] for key in SAME] == [theirs[0][key] for key in SAME]
    assert figures(findings, "full stock")[0]["tokens_per_second"] > 0
    (quantized,) = figures(findings, "qlora stock")
    if find_spec("bitsandbytes"):
        assert quantized["tokens_per_second"] > 0
    else:
        assert quantized == {"left out": "there is no bitsandbytes"}


@pytest.mark.prove
def test_answers_are_the_stock_ways_and_both_are_timed(tmp_path: Path, hidden: Path) -> None:
    done, findings = gpu_script(tmp_path / "out", hidden, "generation")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(finding["ok"] for finding in findings)
    (exact,) = figures(findings, "generation in float32")
    assert exact["same"] == exact["of"] == 8
    (mine,) = figures(findings, "generation ours")
    theirs = figures(findings, "generation against batches of ")
    assert len(theirs) == 2
    for each in theirs:
        assert each["lengths"] == mine["lengths"]
        for part in ("prefill", "decode", "whole"):
            ratio = each[f"{part}_seconds"] / mine[f"{part}_seconds"]
            assert each["theirs / ours"][part] == pytest.approx(ratio)


@pytest.mark.prove
def test_memory_is_foretold_and_counted(tmp_path: Path) -> None:
    done, findings = gpu_script(tmp_path / "out", tmp_path, "fits")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(findings) >= 8
    measured = [finding for finding in findings if "left out" not in finding["figures"]]
    assert len(measured) >= 7
    for each in measured:  # on a CPU a host is no other place
        assert abs(each["figures"]["apart"]) < 0.25 or "on the host" in each["part"]
    (page,) = (tmp_path / "out").glob("*-gpu-tiny.md")
    assert "## Memory of a step" in page.read_text()


@pytest.mark.prove
def test_a_part_that_fails_is_written_down_and_the_others_still_run(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    # Python reads this file at its start. Steps cannot be profiled then, which parity does without.
    start = "import sys\nsys.modules['glm_accelerate.bench.breakdown'] = None\n"
    (hidden / "sitecustomize.py").write_text(start)
    done, findings = gpu_script(tmp_path / "out", hidden, "lora-4096 ours", "parity")
    assert done.returncode == 1
    failed = {finding["part"]: finding["figures"] for finding in findings if finding["ok"] is False}
    assert set(failed) == {"lora-4096 ours"}
    assert "breakdown" in failed["lora-4096 ours"]["error"]
    assert len(figures(findings, "parity ")) == 4


@pytest.mark.prove
def test_a_part_that_takes_too_long_is_killed_and_named(tmp_path: Path) -> None:
    done, findings = gpu_script(tmp_path / "out", tmp_path, "--seconds", "1.1", "parity")
    assert done.returncode == 1
    assert findings == [{"part": "parity", "ok": False, "figures": {"error": "killed after 1 s"}}]


@pytest.mark.parametrize(
    ("words", "said"),
    [(["lora"], "there is no part 'lora'"), (["machine"], "no CUDA device")],
)
def test_what_cannot_be_done_is_said(tmp_path: Path, words: Sequence[str], said: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("here is a GPU")
    done, findings = gpu_script(tmp_path / "out", tmp_path, *words, tiny=False)
    assert done.returncode != 0
    assert said in done.stderr
    assert findings == []
