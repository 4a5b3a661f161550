"""Step times of real runs by how samples are dealt, and with one rank at half its speed.

python -m benchmarks.layouts.dealt [--ranks 2] [--steps 40] [--repeats 3] [--out DIR]
A small GLM-4, one thread a rank, over gloo on this machine's CPU: give it as many free cores as ranks.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.report import Origin, number, origin, page, publish, table
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.pack import Dealing
from glm_accelerate.demo.tiny import Size, write_tiny
from glm_accelerate.observe.events import read_events
from glm_accelerate.parallel.launch import launch
from glm_accelerate.runtime.errors import ExitCode
from glm_accelerate.training.run import train

SHAPE = Size(hidden=256, layers=4, heads=8, kv_heads=2, head_dim=32, ffn=512)
EACH, MEDIAN, TAIL, LONGEST = 6, 5.0, 1.3, 4000  # samples of a rank; of lengths: log of the median, spread
TURN = 0.02  # seconds that a slowed rank computes, and as many that it is stopped
CASES = (
    ("alike", "count", "tokens", "off"),
    ("alike", "tokens", "tokens", "off"),
    ("alike", "cost", "cost", "off"),
    ("alike", "cost, measured", "measured", "off"),
    ("alike", "tokens", "tokens", "full"),
    ("alike", "cost", "cost", "full"),
    ("one at half its speed", "cost, as if all were alike", "cost", "off"),
    ("one at half its speed", "cost, measured, a smaller share", "measured", "off"),
    ("one at half its speed", "cost, as if all were alike", "cost", "full"),
    ("one at half its speed", "cost, measured, a smaller share", "measured", "full"),
)
ABOUT = """
Seconds of a step: the median of the second half of a run, whose checkpoints measure anew after each quarter;
the least and the most of {repeats} runs, the ways in turn. All have the same samples in every step:
{each} a rank, lengths from a log-normal, cut at {longest:,} tokens. Half the speed: a rank is stopped for
20 ms in every 40 (SIGSTOP). **shares**: of a step at the end. **full**: FSDP, where ranks wait in every pass.
"""


@dataclass(frozen=True)
class Task:
    """What a rank runs."""

    config: dict[str, Any]
    run: str
    count: bool


@dataclass
class Timed:
    """One way to deal."""

    ranks: str
    way: str
    shard: str
    seconds: list[float]
    shares: list[float]


def one_rank(task: Task) -> None:
    Path(task.run, f"process-{os.environ['RANK']}").write_text(str(os.getpid()))
    if task.count:
        Dealing.cost = lambda self, length: 1.0
    train(RunConfig.model_validate(task.config), Path(task.run, "run"))


def slow_down(file: Path, over: threading.Event) -> None:
    """Stop and continue a process in turn, from when its number is known."""
    while not over.wait(TURN):
        if file.is_file() and (number := file.read_text()):
            try:
                os.kill(int(number), signal.SIGSTOP)
                time.sleep(TURN)
                os.kill(int(number), signal.SIGCONT)
            except ProcessLookupError:
                return


def prepare(work: Path, count: int) -> dict[str, Any]:
    """Model and data; the config without what a case says."""
    words, drawn = [f"w{number}" for number in range(500)], random.Random(0)
    lengths = [min(LONGEST, 8 + int(drawn.lognormvariate(MEDIAN, TAIL))) for _ in range(count)]
    with (work / "train.jsonl").open("w") as file:
        for length in lengths:
            answer = {"role": "assistant", "content": " ".join(drawn.choices(words, k=length))}
            file.write(json.dumps({"messages": [{"role": "user", "content": "w1"}, answer]}) + "\n")
    return {
        "model": {"path": str(write_tiny(work / "model", words, size=SHAPE)), "dtype": "float32"},
        "adapt": {"method": "full"},
        "data": {"train": str(work / "train.jsonl"), "max_tokens": 4096, "cache": str(work / "cache")},
        "precision": {"compute": "float32", "compile": "off"},
    }


def timed(case: Sequence[str], said: dict[str, Any], ranks: int, steps: int, work: Path) -> Timed:
    slowness, way, balance, shard = case
    config = {
        **said,
        "train": {"steps": steps, "step_samples": EACH * ranks, "micro_tokens": 4096},
        "checkpoint": {"every": steps // 4, "wait": True},
        "parallel": {"balance": balance, "shard": shard},
    }
    over = threading.Event()
    with tempfile.TemporaryDirectory(dir=work) as run:
        slowed = threading.Thread(target=slow_down, args=(Path(run, "process-1"), over))
        if slowness != "alike":
            slowed.start()
        try:
            code = launch(one_rank, Task(config, run, way == "count"), ranks, lambda: 0, ExitCode.USERS_INPUT)
        finally:
            over.set()
        if code != 0:
            raise SystemExit(f"{way}: {ranks} ranks ended with exit code {code}")
        events = read_events(Path(run, "run", "events.jsonl"))
    seconds = [float(str(event["seconds"])) for event in events if event["kind"] == "step"]
    shares = [event["shares"] for event in events if "shares" in event]
    return Timed(slowness, way, shard, [median(seconds[steps // 2 :])], list(shares[-1]) if shares else [])  # pyright: ignore[reportArgumentType]


def markdown(source: Origin, found: Sequence[Timed], repeats: int) -> str:
    def cells(one: Timed) -> Sequence[str]:
        low, high = number(min(one.seconds)), number(max(one.seconds))
        shares = ", ".join(f"{share:g}" for share in one.shares) or "equal"
        return one.ranks, one.way, one.shard, number(median(one.seconds)), f"{low} to {high}", shares

    heads = "ranks are", "dealt by", "shard", "seconds", "runs", "shares"
    about = ABOUT.format(repeats=repeats, each=EACH, longest=LONGEST)
    return page(
        "Balance: step times of real runs", source, [], about, table(heads, map(cells, found), (0, 1))
    )


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Step times by how samples are dealt, measured.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="of each run; a multiple of 4")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="directory for the JSON and Markdown; default: only print")
    given = parser.parse_args(words)
    source = origin(["python", "-m", "benchmarks.layouts.dealt", *words], {"torch": torch.__version__})
    os.environ["OMP_NUM_THREADS"] = "1"
    found: dict[Sequence[str], Timed] = {}
    with tempfile.TemporaryDirectory() as work:
        said = prepare(Path(work), EACH * given.ranks * given.steps // 2)
        for _ in range(given.repeats):
            for case in CASES:
                one = timed(case, said, given.ranks, given.steps, Path(work))
                before = found.get(case)
                found[case] = one
                one.seconds = [*(before.seconds if before else []), *one.seconds]
    text = markdown(source, list(found.values()), given.repeats)
    publish(given.out, "layouts-dealt", source, text, {"timed": [asdict(one) for one in found.values()]})


if __name__ == "__main__":
    main(sys.argv[1:])
