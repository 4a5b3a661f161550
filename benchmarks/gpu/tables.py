"""The tables of single kernels (`benchmarks/kernels/`), each in a process of its own."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu.finding import Finding

TABLES = ("attention", "cross_entropy")
LIMIT = 100  # seconds of one
SAID = 3_000  # characters of a table that is kept in the finding; the whole is written beside it


def tables(out: Path, tiny: bool) -> Iterator[Finding]:
    for name in TABLES:
        module, part = f"benchmarks.kernels.{name}", f"kernel table {name}"
        if find_spec(module) is None:
            yield Finding(part, None, {"left out": f"there is no {module}"})
            continue
        command = [sys.executable, "-m", module, "--out", str(out), *(["--tiny"] if tiny else [])]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            yield Finding(part, False, {"error": f"not done after {LIMIT} s"})
            continue
        failed = {"error": done.stderr[-SAID:]} if done.returncode else {}
        yield Finding(part, done.returncode == 0, {"said": done.stdout[-SAID:], **failed})
