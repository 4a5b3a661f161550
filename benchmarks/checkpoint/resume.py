"""Finding the checkpoint to go on from, among 3 siblings and among 100,000: ours and the stock ways.

python -m benchmarks.checkpoint.resume [--siblings 3 100000] [--repeats 9] [--out DIR]

It needs strace, which counts the directories that each way reads.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import transformers
from transformers.trainer_utils import get_last_checkpoint

from benchmarks.race.report import Origin, number, origin, publish
from glm_accelerate.checkpoint.checkpointer import Checkpointer, Save
from glm_accelerate.checkpoint.format import FOLDER, OPTIMIZER, WEIGHTS, Piece
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.train.directory import choose_start

NEWEST = 1_000_000  # the step of the one real checkpoint
MEGABYTES = 4

ABOUT = """\
One real checkpoint of {size} MB, the newest, among empty directories with the names of older ones. **ms**:
until its path is known; ours has then verified its manifest (of the latest, also that every file is there in
its size). Medians over {repeats} rounds in one process, all ways in turn, each called once before it is
timed; smallest to largest in brackets. **directories**, **calls**: directories of the run that were read,
and the getdents64 calls for it, in a process of its own under strace among {most:,}; ours reads the whole
state, too, and verifies it.

- `get_last_checkpoint` of transformers: the newest name that is a directory, whatever is in it.
- `GLM-4's loop`: our own re-statement of what its fine-tune script does at `yes`: every name with
  "eckpoint" and without "tmp" is taken for a number, the largest wins, whatever is in it.
"""


def explicit(run: Path) -> Path:
    return _first(run, str(run / FOLDER / f"checkpoint-{NEWEST}"))


def by_step(run: Path) -> Path:
    return _first(run, str(NEWEST))


def latest(run: Path) -> Path:
    return _first(run, "auto")


def _first(run: Path, resume: str) -> Path:
    """As `train --resume` goes about it."""
    path = choose_start(run, resume).paths[0]
    assert Reader(path).manifest.step == NEWEST
    return path


def by_transformers(run: Path) -> Path:
    found = get_last_checkpoint(str(run / FOLDER))
    assert found is not None
    return Path(found)


def by_the_loop(run: Path) -> Path:
    newest = 0
    for name in os.listdir(run / FOLDER):
        if "eckpoint" in name and "tmp" not in name:
            newest = max(newest, int(name.replace("checkpoint-", "")))
    return run / FOLDER / f"checkpoint-{newest}"


WAYS: dict[str, Callable[[Path], Path]] = {
    "ours, --resume PATH": explicit,
    "ours, --resume STEP": by_step,
    "ours, --resume auto": latest,
    "transformers, get_last_checkpoint": by_transformers,
    "GLM-4's loop": by_the_loop,
}


@dataclass(frozen=True)
class Row:
    """One way. Seconds of every round by the number of siblings; what strace saw among the most."""

    way: str
    seconds: dict[int, list[float]]
    directories: int
    calls: int


def make(run: Path, siblings: int) -> None:
    """A run whose other checkpoints are only names."""
    tensor = torch.randn(MEGABYTES * 10**6 // 8)
    groups = {WEIGHTS: {"weight": Piece.whole(tensor)}, OPTIMIZER: {"weight::exp_avg": Piece.whole(tensor)}}
    checkpointer = Checkpointer(run)
    checkpointer.save(Save(NEWEST, 1, groups, {"position": NEWEST}, {}, {}), wait=True)
    checkpointer.close(60)
    folder = os.open(run / FOLDER, os.O_RDONLY)
    for step in range(siblings):
        os.mkdir(f"checkpoint-{step}", dir_fd=folder)
    (run / FOLDER / "latest").unlink()  # the stock loop would die of any other name with "eckpoint" in it
    os.close(folder)


def look(way: str, run: Path) -> None:
    """What is traced: find it, and read it if it is ours to read."""
    path = WAYS[way](run)
    assert path.name == f"checkpoint-{NEWEST}"
    if way.startswith("ours"):
        reader = Reader(path)
        reader.state()
        assert all(reader.group(group) for group in (WEIGHTS, OPTIMIZER))


def traced(way: str, run: Path) -> tuple[int, int]:
    """Directories of the run that were read, and calls."""
    log = run.with_suffix(".log")
    words = ["strace", "-f", "-y", "-s", "0", "-e", "trace=getdents64", "-o", str(log)]
    look_again = [sys.executable, "-m", "benchmarks.checkpoint.resume", "--look", way, "--run", str(run)]
    subprocess.run([*words, *look_again], check=True, stdout=subprocess.DEVNULL)
    read = re.findall(r"getdents64\(\d+<([^>]*)>", log.read_text())
    assert read, "the trace saw nothing, not even Python's own directories"
    ours = [path for path in read if Path(path).is_relative_to(run)]
    return len(set(ours)), len(ours)


def markdown(source: Origin, repeats: int, rows: Sequence[Row]) -> str:
    counts = list(rows[0].seconds)

    def spread(seconds: Sequence[float]) -> str:
        low, middle, high = (1e3 * value for value in (min(seconds), median(seconds), max(seconds)))
        return f"{number(middle)} ({number(low)} to {number(high)})"

    lines = [
        "# Finding the checkpoint to go on from\n",
        f"- {source.date}; {source.machine}; load when it began {source.load:.1f}",
        f"- `{source.command}`",
        f"- commit {source.commit}",
        "- " + ", ".join(f"{name} {version}" for name, version in source.versions.items()),
        "",
        ABOUT.format(size=MEGABYTES, repeats=repeats, most=max(counts)),
        "| | " + " | ".join(f"ms among {count:,}" for count in counts) + " | directories | calls |",
        "| --- |" + " ---: |" * (len(counts) + 2),
    ]
    for row in rows:
        times = " | ".join(spread(row.seconds[count]) for count in counts)
        lines.append(f"| {row.way} | {times} | {row.directories} | {row.calls} |")
    return "\n".join(lines) + "\n"


def measure(given: argparse.Namespace, scratch: Path) -> list[Row]:
    runs = {count: scratch / f"run-{count}" for count in given.siblings}
    for count, run in runs.items():
        make(run, count)
    seconds: dict[str, dict[int, list[float]]] = {way: {count: [] for count in runs} for way in WAYS}
    for _ in range(given.repeats):
        for way, find in WAYS.items():
            for count, run in runs.items():
                find(run)  # so that what came before leaves no trace in the caches
                began = time.perf_counter()
                path = find(run)
                seconds[way][count].append(time.perf_counter() - began)
                assert path.name == f"checkpoint-{NEWEST}"
    return [Row(way, seconds[way], *traced(way, runs[max(runs)])) for way in WAYS]


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Finding the checkpoint to go on from.")
    parser.add_argument("--siblings", type=int, nargs="+", default=[3, 100_000])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--scratch", type=Path, help="where the directories are made (default: temporary)")
    parser.add_argument("--out", type=Path, help="directory for the JSON and Markdown; default: only print")
    parser.add_argument("--look", choices=list(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.look:
        look(given.look, given.run)
        return
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    source = origin(["python", "-m", "benchmarks.checkpoint.resume", *words], versions)
    with tempfile.TemporaryDirectory(dir=given.scratch, prefix="resume-") as scratch:
        rows = measure(given, Path(scratch))
    text = markdown(source, given.repeats, rows)
    print(text)
    if given.out is not None:
        figures = {"rows": [asdict(row) for row in rows]}
        publish(given.out, f"resume-{max(given.siblings)}", source, text, figures)


if __name__ == "__main__":
    main(sys.argv[1:])
