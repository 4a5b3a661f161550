"""Memory of each rank, and the price of dividing: N ranks against one, by the trainer itself.

python -m benchmarks.ranks.memory --data TRAIN.jsonl [--ranks 1 2 4] [--methods full lora] [--out DIR]
Ranks are a number of them, which share one copy of the state, or that and a layout: 4:tensor=2:pipeline=2.

A GLM-4 whose state outweighs its activations, over gloo on this machine's CPU, one thread a rank.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.race.prepare_model import WORDS, Shape, prepare_model
from benchmarks.ranks.rank import Measured, Task, measure
from benchmarks.report import Origin, number, origin, page, publish, table
from glm_accelerate.parallel.launch import launch
from glm_accelerate.runtime.errors import ExitCode

WARM = 2  # steps whose times are left out: buffers and kernels are made in them
LEAST = 3  # steps of a run that only memory is read from

ABOUT = """\
Megabytes (10^6 bytes) of the rank that has the most. **held**: what this rank has of weights, gradients and
moments, counted from the tensors when the optimizer is about to use them; **to one**: against one rank (1/N
would be even). **peak**: the most that was resident (VmHWM) above what Python, torch and our modules take
before anything is loaded; *until ready* while the model is read, divided and proved, *in a step* after that.
Peaks are of runs in which malloc gives back what is freed (`MALLOC_MMAP_THRESHOLD_`), on all sides alike;
*as shipped* is without that: glibc keeps most of what was ever gathered for later.

**Time is no statement about scaling**: up to {most} processes run on {cores} cores, one thread each,
so it shows what dividing costs. **processor**: seconds of all ranks together for one step, without waiting;
if dividing were free, the number would stay. Medians over steps after the first {warm}.
"""


@dataclass(frozen=True)
class Case:
    """One method in a layout. `lean`: freed memory was given back; times are those of `shipped`."""

    method: str
    ranks: str
    lean: list[Measured]
    shipped: list[Measured]


def config_of(given: argparse.Namespace, work: Path, method: str, ranks: str) -> dict[str, Any]:
    layout = dict(word.split("=") for word in ranks.split(":")[1:]) or {"shard": "full"}
    return {
        "model": {"path": str(work / "model")},
        "adapt": {"method": method},
        "data": {"train": str(given.data), "max_tokens": given.max_tokens, "cache": str(work / "cache")},
        "train": {"steps": 10 * given.steps, "step_samples": given.samples},
        "precision": {"compile": "off"},
        "parallel": {key: int(size) if size.isdigit() else size for key, size in layout.items()},
        "checkpoint": {"every": 10 * given.steps, "wait": True},  # none is reached, no memory is set aside
    }


def run(config: dict[str, Any], ranks: int, steps: int, work: Path, *, lean: bool) -> list[Measured]:
    with tempfile.TemporaryDirectory(dir=work) as directory:
        if lean:
            os.environ["MALLOC_MMAP_THRESHOLD_"] = "131072"  # said at all, it no longer grows
        code = launch(measure, Task(config, directory, steps), ranks, lambda: 0, ExitCode.USERS_INPUT)
        os.environ.pop("MALLOC_MMAP_THRESHOLD_", None)
        if code != 0:
            raise SystemExit(f"{ranks} ranks ended with exit code {code}")
        files = [Path(directory) / f"measured-{rank}.json" for rank in range(ranks)]
        return [Measured(**json.loads(file.read_text())) for file in files]


def held(measured: Sequence[Measured]) -> int:
    return max(one.parameters + one.gradients + one.moments for one in measured)


def alone(case: Case, cases: Sequence[Case]) -> Case:
    """The same method on one rank, if it was measured."""
    return next((other for other in cases if other.method == case.method and other.ranks == "1"), case)


def memory_row(case: Case, one: Case) -> Sequence[object]:
    most = max(case.lean, key=lambda rank: rank.parameters)
    ready = [max(rank.loading - rank.before for rank in c.lean) for c in (case, one)]
    step = [max(rank.training - rank.before for rank in c.lean) for c in (case, one)]
    shipped = max(rank.training - rank.before for rank in case.shipped)
    sizes = [most.parameters, most.gradients, most.moments, held(case.lean)]
    return (
        case.method,
        case.ranks,
        *(f"{size / 1e6:,.1f}" for size in sizes),
        f"{held(case.lean) / held(one.lean):.3f}",
        f"{ready[0] / 1e6:,.0f}",
        f"{ready[0] / ready[1]:.2f}",
        f"{step[0] / 1e6:,.0f}",
        f"{step[0] / step[1]:.2f}",
        f"{shipped / 1e6:,.0f}",
    )


def time_row(case: Case, one: Case) -> Sequence[object]:
    wall = [median(c.shipped[0].wall_seconds[WARM:]) for c in (case, one)]
    cpu = [sum(median(rank.cpu_seconds[WARM:]) for rank in c.shipped) for c in (case, one)]
    ratios = [f"{wall[0] / wall[1]:.2f}", f"{cpu[0] / cpu[1]:.2f}"]
    return case.method, case.ranks, number(wall[0]), ratios[0], number(cpu[0]), ratios[1]


def markdown(source: Origin, given: argparse.Namespace, parameters: int, cases: Sequence[Case]) -> str:
    model = (
        f"GLM-4 0414, {parameters / 1e6:.1f} M parameters, {given.layers} layers; {given.steps} steps "
        f"of {given.samples} samples of at most {given.max_tokens} tokens"
    )
    memory = "weights, gradients, moments, held, to one, peak until ready, to one, peak in a step, to one"
    times = "s a step, to one, processor s, to one"
    pairs = [(case, alone(case, cases)) for case in cases]
    return page(
        "Memory and step time of divided training",
        source,
        [model],
        ABOUT.format(
            most=max(int(ranks.split(":")[0]) for ranks in given.ranks), cores=os.cpu_count(), warm=WARM
        ),
        table(("", "ranks", *memory.split(", "), "as shipped"), (memory_row(*pair) for pair in pairs)),
        "",
        table(("", "ranks", *times.split(", ")), (time_row(*pair) for pair in pairs)),
    )


def arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Memory and step time of divided training.")
    parser.add_argument("--data", type=Path, required=True, help="JSONL with messages")
    parser.add_argument("--ranks", nargs="+", default=["1", "2", "4"])
    parser.add_argument("--methods", nargs="+", default=["full", "lora"])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--samples", type=int, default=4, help="in a step, all ranks together")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, help="directory for the JSON and Markdown; default: only print")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> None:
    given = arguments(words)
    given.data = given.data.resolve()
    source = origin(["python", "-m", "benchmarks.ranks.memory", *words], {"torch": torch.__version__})
    os.environ["OMP_NUM_THREADS"] = "1"
    cases: list[Case] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        work = Path(folder)
        prepare_model(given.data, work / "model", WORDS, shape=Shape(layers=given.layers))
        parameters = json.loads((work / "model" / "made.json").read_text())["parameters"]
        for method in given.methods:
            for ranks in given.ranks:
                config, count = config_of(given, work, method, ranks), int(ranks.split(":")[0])
                lean = run(config, count, LEAST, work, lean=True)
                cases.append(Case(method, ranks, lean, run(config, count, given.steps, work, lean=False)))
                print(f"{method}, {ranks}: done", file=sys.stderr, flush=True)
    figures = {"parameters": parameters, "cases": [asdict(case) for case in cases]}
    publish(given.out, "ranks-memory", source, markdown(source, given, parameters, cases), figures)


if __name__ == "__main__":
    main(sys.argv[1:])
