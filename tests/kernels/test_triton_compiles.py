"""Triton's compiler and ptxas take every kernel, for GPUs that are not here: its interpreter takes more than
they do. At the widths of real models no thread runs out of registers.
"""

import ast
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

KERNELS = Path(str(find_spec("glm_accelerate.kernels").origin)).parent  # pyright: ignore
TARGETS = {"A100": 80, "H200": 90}


def kernels() -> set[str]:
    """Those that are launched: what starts with `_` and is called from another kernel is part of that."""
    found: set[str] = set()
    for file in KERNELS.glob("triton_*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        launched = {ast.unparse(node.value) for node in ast.walk(tree) if isinstance(node, ast.Subscript)}
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list]
        found |= {f"{file.stem}.{node.name}" for node in functions if node.name in launched}
    return found


@pytest.mark.process
@pytest.mark.parametrize("gpu", [pytest.param("A100", marks=pytest.mark.prove), "H200"])
def test_every_kernel_compiles(gpu: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, str(Path(__file__).with_name("compile_all.py")), str(TARGETS[gpu])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert {line["kernel"] for line in said} == kernels()
    assert [line for line in said if line["stack"] and line["kernel"] != "triton_layer_norm._backward"] == []
