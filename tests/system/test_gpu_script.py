"""`benchmarks/gpu.sh --tiny`: what runs on a GPU machine, at tiny size on the CPU, from the bare checkout."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = {
    "machine",
    "parity glm4 float32",
    "parity glm4 bfloat16",
    "parity glm float32",
    "parity glm bfloat16",
    "steps, recompute on",
    "steps, recompute off",
}


def gpu_script(out: Path, hidden: Path) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """Modules in `hidden` stand before the installed ones."""
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHON": sys.executable,
        "PYTHONPATH": str(hidden),
        "OUT": str(out),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks/gpu.sh"), "--tiny"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    written = out / "gpu-tiny.jsonl"
    assert written.exists(), done.stderr
    return done, [json.loads(line) for line in written.read_text().splitlines()]


def test_every_part_passes_where_our_own_dependencies_are_not_installed(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    for module in ("pydantic", "sentencepiece", "rich"):
        (hidden / f"{module}.py").write_text(f"raise ImportError('no {module} here')\n")
    done, findings = gpu_script(tmp_path / "out", hidden)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {finding["part"] for finding in findings} == PARTS
    assert all(finding["ok"] for finding in findings if finding["part"] != "machine")
    steps = [finding["figures"] for finding in findings if finding["part"].startswith("steps")]
    assert all(figures["tokens_per_second"] > 0 for figures in steps)
    # Recomputing saves memory and changes nothing that is learnt.
    assert steps[0]["losses"] == pytest.approx(steps[1]["losses"], abs=0.01)


def test_a_part_that_fails_is_written_down_and_the_others_still_run(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    # Python reads this file at its start. LoRA cannot be imported then: the steps fail, parity needs none.
    start = "import sys\nsys.modules['glm_accelerate.models.adapt.lora'] = None\n"
    (hidden / "sitecustomize.py").write_text(start)
    done, findings = gpu_script(tmp_path / "out", hidden)
    assert done.returncode == 1
    failed = {finding["part"]: finding["figures"] for finding in findings if finding["ok"] is False}
    assert set(failed) == {part for part in PARTS if part.startswith("steps")}
    assert "lora" in failed["steps, recompute on"]["error"]
    assert {finding["part"] for finding in findings} == PARTS
