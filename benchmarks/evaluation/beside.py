"""What evaluation costs training: with an evaluator beside it on a spare core, without one, with one that is
killed again and again, with one that hangs, inline, and with one that shares training's cores.

python -m benchmarks.evaluation.beside --data TRAIN.jsonl DEV.jsonl [--steps 96] [--rounds 5] [--out DIR]

Every way is a process of its own (`train` as users run it), all ways in turn, round after round. Weights of
all are compared bit by bit.
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.race.prepare_model import SMALL, TINY, WORDS, prepare_model
from benchmarks.report import Origin, origin, page, publish, spread, table
from glm_accelerate.checkpoint.format import OPTIMIZER, WEIGHTS
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.observe.events import Event, read_events

Said = dict[str, Any]

EVALUATIONS = 4
CHILD = b"glm_accelerate.evaluate.measuring.serve"  # in the command line of an evaluator
DISTURB = 2.0  # seconds between two kills

ABOUT = """\
**step**: median seconds of a training step, over the same ways's rounds the median of that, and what that is
to `off` of the same round (median; smallest and largest). **training**: seconds from the first step's end
to the last one's, everything between steps included, to `off`. **blocked**: seconds that one evaluation
keeps training waiting, from the `snapshot` events (inline: all of the evaluation). **equal**: whether weights
and moments after the last step are those of `off`, bit by bit. **answered**: evaluations that ended `done`.

`off`: no held-out data. `neighbour`: none either, but a program that has nothing to do with ours multiplies
matrices on the other core from beginning to end: what work there costs here, whoever does it. **busy**: the
share of the training time in which an evaluation was under way. **by itself**: 1 + busy x what `neighbour`
costs: the training time that the machine alone explains.

`beside`: `evaluate.where=beside`, the evaluator on the core that training leaves.
`killed`: the same, and every evaluator gets SIGKILL two seconds after it began. `hung`: SIGSTOP instead.
`inline`: training waits. `shared`: training takes both cores, the evaluator too
(against `off` with both cores).
"""

WAYS: dict[str, tuple[str | None, int, int | None]] = {  # where, threads of training, signal to evaluators
    "off": (None, 1, None),
    "neighbour": (None, 1, None),
    "beside": ("beside", 1, None),
    "killed": ("beside", 1, signal.SIGKILL),
    "hung": ("beside", 1, signal.SIGSTOP),
    "inline": ("inline", 1, None),
    "off, 2 threads": (None, 2, None),
    "shared": ("beside", 2, None),
}
NEIGHBOUR = """
import os, torch
os.nice(10)
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
torch.set_num_threads(1)
x, weight = torch.randn(1024, 512).bfloat16(), torch.randn(2048, 512).bfloat16()
while True:
    torch.nn.functional.linear(x, weight)
"""
AGAINST = {"shared": "off, 2 threads"}  # else `off`


@dataclass(frozen=True)
class Ran:
    """One run of one way."""

    step: float
    training: float
    blocked: list[float]
    answered: int
    asked: int
    digest: str
    busy: float  # seconds of evaluations while steps were trained


def config_of(given: argparse.Namespace, model: Path, cache: Path, where: str | None) -> Said:
    train_file, dev_file = given.data
    data: Said = {"train": str(train_file), "max_tokens": 1024, "cache": str(cache)}
    evaluate: Said = {"every": max(1, given.steps // EVALUATIONS), "patience": 60, "timeout": 20}
    if where is not None:
        data["dev"] = str(dev_file)
        evaluate |= {"where": where, "samples": given.samples}
    return {
        "model": {"path": str(model)},
        "adapt": {"method": given.method},
        "data": data,
        "train": {"steps": given.steps, "step_samples": 4, "seed": 0},
        "precision": {"compile": "off"},
        "optim": {"learning_rate": 5e-4},
        "evaluate": evaluate,
        "checkpoint": {"every": given.steps, "keep_best": 0},
    }


@contextmanager
def neighbour(wanted: bool) -> Generator[None]:
    """Somebody who computes on the last core."""
    process = subprocess.Popen([sys.executable, "-c", NEIGHBOUR]) if wanted else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def run(config: Said, directory: Path, threads: int, disturbance: int | None) -> Ran:
    """As a user does, with somebody who sends signals to its evaluators."""
    file = directory.with_suffix(".json")
    file.write_text(json.dumps(config))
    words = [sys.executable, "-m", "glm_accelerate.cli.main", "train", str(file), "--run", str(directory)]
    log = directory.with_suffix(".log")
    with log.open("wb") as out:
        process = subprocess.Popen(
            words, stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": str(threads)}
        )
        seen: dict[int, float] = {}
        while process.poll() is None:
            time.sleep(0.1)
            for child in evaluators(process.pid) if disturbance is not None else ():
                began = seen.setdefault(child, time.monotonic())
                if time.monotonic() - began > DISTURB:
                    os.kill(child, disturbance or 0)
                    seen[child] = float("inf")
    if process.returncode:
        raise SystemExit(f"{directory.name} ended with {process.returncode}: {log.read_text()[-2000:]}")
    return read(directory, config["train"]["steps"])


def evaluators(parent: int) -> list[int]:
    """Children of a process that evaluate."""
    children: list[int] = []
    for number in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        try:
            if CHILD in Path(f"/proc/{number}/cmdline").read_bytes():
                children.append(int(number))
        except FileNotFoundError:
            continue
    return children


def read(directory: Path, steps: int) -> Ran:
    """What a run's own records say."""
    events = list(read_events(directory / "events.jsonl"))
    trained = [event for event in events if event["kind"] == "step"]
    judged = [event for event in events if event["kind"] == "eval"]
    inline = not any(event["kind"] == "snapshot" for event in events)
    blocked = [event["seconds"] for event in judged if event["step"]] if inline else []
    blocked += [event["blocked_seconds"] for event in events if event["kind"] == "snapshot" and event["step"]]
    return Ran(
        step=median(event["seconds"] for event in trained[2:]),
        training=trained[-1]["time"] - trained[0]["time"],
        blocked=blocked,
        answered=sum(event["status"] == "done" for event in judged),
        asked=len(judged),
        digest=digest(directory / "checkpoints" / f"checkpoint-{steps}"),
        busy=0.0 if inline else busy(judged, trained[0]["time"], trained[-1]["time"]),
    )


def busy(judged: Sequence[Event], begin: float, end: float) -> float:
    """Seconds between two times in which an evaluation was under way; one is told when it is over."""
    spans = [(event["time"] - event["seconds"], event["time"]) for event in judged]
    return sum(max(0.0, min(end, last) - max(begin, first)) for first, last in spans)


def digest(checkpoint: Path) -> str:
    """Of every weight and moment."""
    reader, whole = Reader(checkpoint), hashlib.sha256()
    for group in (WEIGHTS, OPTIMIZER):
        for name, tensor in sorted(reader.group(group).items()):
            whole.update(name.encode())
            whole.update(tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.ndim else b"")
            whole.update(repr(tensor.tolist()).encode() if not tensor.ndim else b"")
    return whole.hexdigest()


def ratios(ways: Mapping[str, Sequence[Ran]], name: str, what: str) -> list[float]:
    """To the way without evaluation, round by round."""
    before = ways[AGAINST.get(name, "off")]
    return [getattr(one, what) / getattr(off, what) for one, off in zip(ways[name], before, strict=True)]


def markdown(source: Origin, given: argparse.Namespace, ways: Mapping[str, Sequence[Ran]]) -> str:
    cost = median(ratios(ways, "neighbour", "training")) - 1 if "neighbour" in ways else 0.0

    def cells(name: str) -> Sequence[str]:
        runs, off = ways[name], ways[AGAINST.get(name, "off")]
        equal = all(one.digest == other.digest for one, other in zip(runs, off, strict=True))
        waits = [seconds for one in runs for seconds in one.blocked]
        share = median(one.busy / one.training for one in runs)
        return (
            name,
            f"{median(one.step for one in runs):.3f}",
            *(spread(ratios(ways, name, what), 3) for what in ("step", "training")),
            *((f"{share:.0%}", f"{1 + share * cost:.3f}") if share else "--"),
            f"{median(waits):.4f}" if waits else "-",
            f"{sum(one.answered for one in runs)} of {sum(one.asked for one in runs)}",
            "yes" if equal else "NO",
        )

    setting = (
        f"{given.method}, {given.steps} steps of 4 samples, {EVALUATIONS} evaluations and one before the"
        f" first step, of {given.samples} held-out samples each, {given.rounds} rounds"
    )
    columns = "way, step s, step to off, training to off, busy, by itself, blocked s, answered, equal"
    body = table(columns.split(", "), map(cells, ways), left=(0, 8))
    return page("What evaluation costs training", source, [setting], body, "", ABOUT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", nargs=2, type=Path, required=True, metavar=("TRAIN", "DEV"))
    parser.add_argument("--method", default="lora", choices=("lora", "full"))
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=16, help="held-out samples an evaluation")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--tiny", action="store_true", help="to try it out")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.data = [path.resolve() for path in given.data]
    ways: dict[str, list[Ran]] = {name: [] for name in given.ways}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare_model(given.data[0], work / "model", WORDS, shape=TINY if given.tiny else SMALL)
        for number in range(given.rounds):
            for name in given.ways:
                where, threads, disturbance = WAYS[name]
                config = config_of(given, work / "model", work / "cache", where)
                directory = work / f"{number}-{name.replace(', ', '-')}"
                with neighbour(name == "neighbour"):
                    ways[name].append(run(config, directory, threads, disturbance))
                print(f"round {number + 1}: {name}: {ways[name][-1]}", file=sys.stderr)
    source = origin(sys.argv, {"torch": torch.__version__})
    figures = {name: [asdict(one) for one in runs] for name, runs in ways.items()}
    publish(given.out, f"evaluation-beside-{given.method}", source, markdown(source, given, ways), figures)


if __name__ == "__main__":
    main()
