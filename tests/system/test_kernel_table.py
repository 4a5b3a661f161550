"""`benchmarks.kernels.table --tiny`: every case by every way that a CPU has, kernels interpreted; and the
list of kernels that bind.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton for this system")
def test_all_of_it_runs_and_every_kernel_is_good(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.kernels.table", "--tiny", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (written,) = tmp_path.glob("*-kernels-tiny.json")
    lines = json.loads(written.read_text())["lines"]
    operators = {line["operator"] for line in lines}
    assert len(operators) >= 17
    assert {line["operator"] for line in lines if line["way"] == "ours"} == operators
    unjudged = {line["operator"] for line in lines if line["ok"] is None}
    assert all("dropout 0.1" in operator for operator in unjudged)
    assert [line for line in lines if line["ok"] is False] == []
    assert "the times say nothing" in done.stdout


def test_what_binds_is_what_is_said_in_every_family_method_and_mode(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.kernels.bindings", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (written,) = tmp_path.glob("*-kernels-bindings.json")
    lines = json.loads(written.read_text())["lines"]
    assert len({(line["family"], line["method"], line["mode"]) for line in lines}) == 18
    assert all(line["ok"] for line in lines)
