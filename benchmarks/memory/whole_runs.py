"""Predicted against measured memory and time of real runs of `train`, as their users see both.

python -m benchmarks.memory.whole_runs --work DIR [--data TRAIN.jsonl] [--only NAME ...] [--out DIR]

One run after the other, each in processes of its own. What has been measured stays in --work: a sweep that
was stopped goes on. Without --data, conversations of words drawn at random.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

import torch

from benchmarks.memory.flat import draw_conversations
from benchmarks.race.prepare_model import WORDS, prepare_model
from benchmarks.report import ROOT, Origin, origin, page, publish, table
from glm_accelerate.plan.run_plan import Memory

START = "import sys; from glm_accelerate.cli.main import main; sys.exit(main())"
FEW = "train.steps=12"
EAGER, COMPILED, WIDE = "precision.compile=off", "precision.compile=on", "precision.compute=float32"
FULL, BUCKET, LONG = "adapt.method=full", "data.batching=bucket", "data.max_tokens=2048 train.step_samples=8"
SHORT = "train.step_samples=8 train.micro_tokens=1024"
SHARED = "data.max_tokens=2048 train.step_samples=8 train.micro_tokens=256 parallel.context=2"
LAYOUTS = {  # of four ranks
    "shard 4": "",
    "tensor 2 x pipeline 2": "parallel.tensor=2 parallel.pipeline=2",
    "tensor 2 x shard 2": "parallel.tensor=2",
    "pipeline 2 x shard 2": "parallel.pipeline=2",
}
KINDS = {  # as other processors have it; ours is the one of this machine
    "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "AVX-512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "ATEN_CPU_CAPABILITY": "avx512"},
    "AVX-512 BF16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "ATEN_CPU_CAPABILITY": "avx512"},
}
ABOUT = """\
**predicted**: "memory at most" of `plan`, which is what a run's monitor compares with, too. **measured**: the
most of the steps' `memory_bytes` in events.jsonl, which on a CPU is the high-water mark (VmHWM) of the whole
process: Python, libraries, their workspaces and what the heap cannot use among it; the rehearsal counts to
the first step. Of several ranks, the one with the most. Time: what `plan` says beside the seconds of the
rehearsal and of all steps, and what steps 2 to 10 say of all later ones over what those took; both depend on
who else is at work.
"""


@dataclass(frozen=True)
class Case:
    """A run: what is typed after the config, and on what."""

    overrides: str
    ranks: int = 1
    kind: str = ""


def cases() -> dict[str, Case]:
    every = {
        "LoRA": Case("train.steps=30"),
        "full": Case(f"train.steps=30 {FULL}"),
        "LoRA, bucket": Case(f"train.steps=30 {BUCKET}"),
        "LoRA, 2,048 tokens, 8 samples": Case(f"train.steps=30 {LONG}"),
        "prefix": Case(f"{FEW} adapt.method=prefix"),
        "freeze": Case(f"{FEW} adapt.method=freeze"),
        "LoRA, nf4": Case(f"{FEW} adapt.base=nf4 {COMPILED}"),
        "LoRA, Adafactor": Case(f"{FEW} optim.name=adafactor {COMPILED}"),
        "full, blocks": Case(f"{FEW} {FULL} memory.recompute=blocks {COMPILED}"),
    }
    for form, typed in (("C++ or compiled", COMPILED), ("eager", EAGER), ("float32", WIDE)):
        every |= {
            f"LoRA, {form}": Case(f"{FEW} {typed}"),
            f"full, {form}": Case(f"{FEW} {typed} {FULL}"),
            f"LoRA, {form}, batch 1": Case(f"{FEW} {typed} train.step_samples=1"),
            f"LoRA, {form}, long rows": Case(f"{FEW} {typed} {LONG}"),
        }
    for kind in KINDS:
        every |= {
            f"LoRA on {kind}": Case(FEW, kind=kind),
            f"full on {kind}, eager": Case(f"{FEW} {EAGER} {FULL}", kind=kind),
            f"LoRA on {kind}, compiled": Case(f"{FEW} {COMPILED}", kind=kind),
        }
    for ranks in (2, 3):
        every |= {
            f"LoRA, {ranks} ranks": Case(f"{FEW} {COMPILED}", ranks),
            f"full, {ranks} ranks": Case(f"{FEW} {FULL} {COMPILED}", ranks),
        }
    for name, typed in LAYOUTS.items():
        every[f"full, {name}"] = Case(f"{FEW} {FULL} {COMPILED} {SHORT} {typed}", 4)
    for method, typed in (("LoRA", ""), ("full", FULL)):
        typed_all = f"{FEW} {typed} {COMPILED} {SHARED}"
        every[f"{method}, 2 ranks share documents"] = Case(typed_all, 2)
        every[f"{method}, 2 ranks share products"] = Case(f"{FEW} {typed} {COMPILED} parallel.tensor=2", 2)
        for passes, more in (("one pass", ""), ("several passes", SHORT)):
            typed_all = f"{FEW} {typed} {COMPILED} {more} parallel.pipeline=2"
            every[f"{method}, 2 stages, {passes}"] = Case(typed_all, 2)
    return every


@dataclass(frozen=True)
class Row:
    """What one run came to."""

    name: str
    predicted: int
    measured: int
    forecast: float | None
    seconds: float
    after_ten: float | None  # the forecast of the rest over what it took

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def run(name: str, case: Case, config: Path, work: Path) -> Row:
    """Plan and train."""
    folder = work / name.replace(" ", "_").replace(",", "")
    kept = folder.with_suffix(".result.json")
    if kept.is_file():
        return Row(**json.loads(kept.read_text()))
    environment = {**os.environ, **KINDS.get(case.kind, {})}
    environment |= {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    if case.kind:  # code that was compiled for one kind crashes on another
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(work / f"inductor-{case.kind.replace(' ', '-')}")

    def call(*words: str) -> str:
        command = [sys.executable, "-c", START, *words]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{name}: {done.stderr[-2000:]}{done.stdout[-2000:]}"
        return done.stdout

    words = [str(config), *case.overrides.split()]
    plan = json.loads(call("plan", *words, "--gpus", str(case.ranks), "--json"))
    typed = ["train", *words, "--run", str(folder)]
    most = 0
    if case.ranks == 1:
        call(*typed)
    else:
        most = most_of_ranks([sys.executable, "-c", START, *typed, "--nproc", str(case.ranks)], environment)
    lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    steps = [event for event in events if event["kind"] == "step"]
    said = " ".join(str(event.get("said")) for event in events if event["kind"] == "decision")
    rehearsed = sum(map(float, re.findall(r"rehearsed in ([\d.]+) s", said)))
    took = [event["seconds"] for event in steps]
    tokens = [event["tokens"] for event in steps]
    rest = sum(took[10:])
    rate = sum(took[1:10]) / max(1, sum(tokens[1:10]))
    row = Row(
        name,
        Memory.from_json(plan["memory"]).watched(plan["device"]),
        max(most, *(event["memory_bytes"] for event in steps)),
        plan["time"]["seconds"],
        rehearsed + sum(took),
        rate * sum(tokens[10:]) / rest if len(took) > 20 else None,
    )
    kept.write_text(json.dumps(asdict(row)))
    return row


def most_of_ranks(command: Sequence[str], environment: dict[str, str]) -> int:
    """The largest high-water mark of any rank's process while the command runs."""
    most = 0
    with tempfile.TemporaryFile() as printed:
        launcher = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=printed, stderr=printed)
        while launcher.poll() is None:
            time.sleep(0.1)
            with suppress(OSError):
                children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
                marks = [
                    re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{each}/status").read_text())
                    for each in children
                ]
                most = max([most, *(1024 * int(mark[1]) for mark in marks if mark)])
        printed.seek(0)
        assert launcher.returncode == 0, printed.read().decode()[-2000:]
    return most


def markdown(source: Origin, rows: Sequence[Row]) -> str:
    errors = [abs(row.error) for row in rows]
    worst = max(rows, key=lambda row: abs(row.error))
    summary = (
        f"{len(rows)} runs of a GLM-4-0414 of 34 M parameters; memory: median error {median(errors):.1%}, "
        f"mean {mean(errors):.1%}, largest {abs(worst.error):.1%} ({worst.name})"
    )

    def cells(row: Row) -> Sequence[str]:
        return (
            row.name,
            f"{row.predicted / 2**20:,.0f}",
            f"{row.measured / 2**20:,.0f}",
            f"{row.error:+.1%}",
            "-" if row.forecast is None else f"{row.forecast:,.0f}",
            f"{row.seconds:,.0f}",
            "-" if row.after_ten is None else f"x {row.after_ten:.2f}",
        )

    columns = "predicted MiB, measured MiB, error, forecast s, took s, after ten steps"
    body = table(("", *columns.split(", ")), map(cells, rows))
    return page("Predicted against measured: whole runs", source, [summary], ABOUT, body)


def main(words: Sequence[str]) -> None:
    every = cases()
    parser = argparse.ArgumentParser(description="Predicted against measured, of whole runs.")
    parser.add_argument("--work", type=Path, required=True, help="a folder that a sweep goes on from")
    parser.add_argument("--data", type=Path, help="JSONL with messages (default: drawn)")
    parser.add_argument("--only", nargs="+", choices=list(every), help="some of the runs")
    parser.add_argument("--out", type=Path, help="directory for the JSON and Markdown; default: only print")
    given = parser.parse_args(words)
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    data = given.data.resolve() if given.data else work / "drawn.jsonl"
    if not data.is_file():
        draw_conversations(data, 600, 200, 0)
    if not (work / "model" / "made.json").is_file():
        prepare_model(data, work / "model", WORDS)
    config = work / "run.yaml"
    config.write_text(
        json.dumps(
            {
                "model": {"path": str(work / "model")},
                "data": {"train": str(data)},
                "train": {"step_samples": 4, "steps": 30},
            }
        )
    )
    source = origin(["python", "-m", "benchmarks.memory.whole_runs", *words], {"torch": torch.__version__})
    rows: list[Row] = []
    for name in given.only or every:
        rows.append(run(name, every[name], config, work))
        print(f"{name}: {rows[-1].measured / 2**20:,.0f} MiB, {rows[-1].error:+.1%}", flush=True)
    figures = {"runs": [asdict(row) for row in rows]}
    publish(given.out, "memory-whole-runs", source, markdown(source, rows), figures)


if __name__ == "__main__":
    main(sys.argv[1:])
