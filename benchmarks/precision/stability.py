"""One tiny GLM-4, the same samples in the same steps, in float32, bfloat16, float16 and simulated fp8.

python -m benchmarks.precision.stability --out benchmarks/results

A second float16 begins with a loss scale that is far too high and raises it often: it overflows and recovers
again and again. In a last pair of runs one layer's numbers are beyond float16, which has to find and move it.
"""

import argparse
import math
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.precision.curves import curves
from benchmarks.race.report import Origin, origin, publish
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.demo.task import examples, vocabulary, write_examples
from glm_accelerate.demo.tiny import write_tiny
from glm_accelerate.models.float8 import float8_products
from glm_accelerate.observe.events import read_events
from glm_accelerate.train.build import Built
from glm_accelerate.train.run import train

MATRIX = "model.layers.2.mlp.gate_up_proj.weight"  # a norm makes what follows from it ordinary again
FACTOR = 3000.0


@dataclass(frozen=True)
class Way:
    """One run, compared with another. `outlier`: on the model in which one layer is beyond float16."""

    name: str
    compute: str
    against: str = "float32"
    outlier: bool = False
    scale: float = 65536.0
    raise_every: float = 1.0  # share of the run


OVERFLOWING, OUTLIER = "float16, overflowing", "float32, outlier"
WAYS = (
    Way("float32", "float32"),
    Way("bfloat16", "bfloat16"),
    Way("float16", "float16"),
    Way("fp8, simulated", "fp8"),
    Way(OVERFLOWING, "float16", scale=2.0**24, raise_every=0.1),
    Way("float32, outlier", "float32", OUTLIER, outlier=True),
    Way("float16, outlier", "float16", OUTLIER, outlier=True),
)


@dataclass(frozen=True)
class Course:
    """What a run did, step by step; a loss that is not finite is None."""

    way: Way
    losses: list[float | None]
    applied: list[bool]
    scales: list[float | None]
    held_out: float
    decided: str


def prepare(work: Path, samples: int) -> None:
    """Both models and the data."""
    write_tiny(work / "model", vocabulary())
    shutil.copytree(work / "model", work / "outlier")
    weights = load_file(work / "outlier" / "model.safetensors")
    weights[MATRIX] *= FACTOR
    save_file(weights, work / "outlier" / "model.safetensors", metadata={"format": "pt"})
    write_examples(work / "train.jsonl", examples(samples, seed=1, held_out=False))
    write_examples(work / "dev.jsonl", examples(100, seed=2, held_out=True))


def run(way: Way, work: Path, steps: int, rate: float) -> Course:
    said: dict[str, Any] = {
        "model": {"path": str(work / ("outlier" if way.outlier else "model")), "dtype": "float32"},
        "adapt": {"method": "full"},
        "data": {
            "train": str(work / "train.jsonl"),
            "dev": str(work / "dev.jsonl"),
            "cache": str(work / "cache"),
        },
        "train": {"steps": steps, "step_samples": 16},
        "precision": {
            "compute": "bfloat16" if way.compute == "fp8" else way.compute,
            "compile": "off",
            "loss_scale": way.scale,
            "raise_after": max(2, round(steps * way.raise_every)),
        },
        "optim": {"learning_rate": rate, "betas": [0.9, 0.95], "warmup": 0.05},
        "evaluate": {"every": steps},
        "checkpoint": {"every": steps},
    }

    def swap(built: Built) -> None:
        if way.compute == "fp8":
            assert float8_products(built.run.model, simulated=True) == []

    directory = work / "runs" / way.name.replace(", ", "-")
    result = train(RunConfig.model_validate(said), directory, on_built=swap)
    events: list[dict[str, Any]] = read_events(directory / "events.jsonl")
    done = [event for event in events if event["kind"] == "step"]
    decided = [str(event["said"]) for event in events if event["kind"] == "decision"]
    return Course(
        way=way,
        losses=[event["loss"] for event in done],
        applied=[event["applied"] for event in done],
        scales=[event.get("loss_scale") for event in done],
        held_out=result.losses[steps],
        decided="; ".join(decided),
    )


def mean(losses: list[float | None], first: int, last: int) -> float:
    found = [loss for loss in losses[first:last] if loss is not None]
    return sum(found) / len(found) if found else math.nan


def table(courses: list[Course]) -> str:
    steps = len(courses[0].losses)
    tenth = max(1, steps // 10)
    points = [steps // 4, steps // 2, steps]
    head = ["run", *(f"loss at {point}" for point in points), "held-out", "to float32", "apart, at most"]
    head += ["skipped", "loss scale: first, least, last"]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    named = {course.way.name: course for course in courses}
    for course in courses:
        other = named[course.way.against]
        both = [
            (a, b)
            for a, b in zip(course.losses, other.losses, strict=True)
            if a is not None and b is not None
        ]
        apart = max(abs(a - b) for a, b in both)
        at = [f"{mean(course.losses, point - tenth, point):.4f}" for point in points]
        scales = [scale for scale in course.scales if scale is not None]
        scaled = f"{scales[0]:,.0f}, {min(scales):,.0f}, {scales[-1]:,.0f}" if scales else ""
        row = [course.way.name, *at, f"{course.held_out:.4f}", f"{course.held_out - other.held_out:+.4f}"]
        row += [f"{apart:.4f}", str(course.applied.count(False)), scaled]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def report(source: Origin, courses: list[Course], picture: str) -> str:
    steps = len(courses[0].losses)
    named = {course.way.name: course for course in courses}
    skipped = [number + 1 for number, applied in enumerate(named[OVERFLOWING].applied) if not applied]
    moved = named["float16, outlier"].decided
    return "\n".join(
        [
            "# Four kinds of numbers, one training\n",
            f"- {source.date}; {source.machine}",
            f"- `{source.command}`",
            f"- commit {source.commit}",
            "- " + ", ".join(f"{name} {version}" for name, version in source.versions.items()) + "\n",
            f"The demo's GLM-4 (4 layers, random weights, all of them trained), {steps} steps of 16 samples,",
            "the same samples in the same steps. A loss at a step is the mean of the tenth of the run before",
            "it. `to float32`: how far the held-out losses differ; `apart, at most`: those of any one step.",
            "Weights and moments are float32 everywhere. fp8 is simulated: what goes into a product is",
            "rounded as the hardware does it and multiplied in float32, the rest is bfloat16. Outlier: one",
            f"layer's matrix is {FACTOR:,.0f} times as large, which a norm takes back.\n",
            table(courses),
            f"\n{OVERFLOWING}: its loss scale was set too high on purpose, and is raised every tenth of the",
            f"run. Skipped: {', '.join(map(str, skipped)) or 'none'}, on the way down to a scale that fits,",
            "and wherever it had been raised too far. A skipped step's samples are lost to it.\n",
            f"With the outlier it chose: {moved}.\n",
            f"![losses and loss scale]({picture})\n",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    source = origin(
        ["python", "-m", "benchmarks.precision.stability", *sys.argv[1:]], {"torch": str(torch.__version__)}
    )
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(work, args.steps * 16)
        courses: list[Course] = []
        for way in WAYS:
            courses.append(run(way, work, args.steps, args.rate))
            print(f"{way.name}: held-out loss {courses[-1].held_out:.4f}", flush=True)
    name = "precision-stability"
    picture = f"{source.date[:10]}-{name}.svg"
    text = report(source, courses, picture)
    publish(args.out, name, source, text, {"courses": [asdict(course) for course in courses]})
    lines = {course.way.name: course.losses for course in courses if not course.way.outlier}
    scale = {course.way.name: course.scales for course in courses if course.way.name == OVERFLOWING}
    (args.out / picture).write_text(curves(lines, scale), encoding="utf-8")
    print(table(courses))


if __name__ == "__main__":
    main()
