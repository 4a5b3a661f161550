"""A job goes to a fresh process as JSON, and its result comes back as JSON: so runs every side of a race.

A peer's environment has none of our dependencies, so this needs the standard library alone.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.report import ROOT

R = TypeVar("R")
ALONE = {"HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1"}  # no process waits for a network


def run(
    module: str,
    *words: str | Path | int,
    threads: int,
    environment: Mapping[str, str] | None = None,
    python: str | Path = sys.executable,
) -> None:
    """Run a module in a fresh process; its output is shown only if it fails."""
    command = [str(python), "-m", module, *map(str, words)]
    source = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    ours = {**ALONE, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": source, **(environment or {})}
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **ours}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{module} failed ({done.returncode}):\n{(done.stdout + done.stderr)[-4000:]}")


def result(
    module: str,
    job: Any,
    kind: Callable[..., R],
    work: Path,
    *,
    threads: int,
    environment: Mapping[str, str] | None = None,
    python: str | Path = sys.executable,
) -> R:
    """What `python -m MODULE JOB RESULT` wrote about a job, a dataclass; `kind` is made of its fields."""
    files = work / "job.json", work / "result.json"
    write(files[0], job)
    run(module, *files, threads=threads, environment=environment, python=python)
    return read(files[1], kind)


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(asdict(value), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read(path: Path, kind: Callable[..., R]) -> R:
    return kind(**json.loads(path.read_text(encoding="utf-8")))
