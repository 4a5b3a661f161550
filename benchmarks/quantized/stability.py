"""LoRA on one base, kept in five ways: does the loss fall alike, and what is an adapter worth elsewhere?

python -m benchmarks.quantized.stability --out benchmarks/results

A tiny GLM-4 first learns three of the demo's lessons in full, so that there is something in its weights to
lose; then an adapter learns the other two on that base, with the same samples in the same steps.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.race.report import Origin, origin, publish
from glm_accelerate.assemble.model import open_model
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.inputs import open_inputs
from glm_accelerate.data.pipeline import batches
from glm_accelerate.demo.task import Example, examples, vocabulary, write_examples
from glm_accelerate.demo.tiny import write_tiny
from glm_accelerate.evaluate.measuring.losses import held_out_loss
from glm_accelerate.export.export import export
from glm_accelerate.observe.events import read_events
from glm_accelerate.train.run import train

BASES = ("float32", "bfloat16", "int8", "fp8", "nf4")
REFERENCE = "bfloat16"
KNOWN = ("phrase", "sentence", "number")  # what the base learns first
COLOURS = ("#5f6b7a", "#1f6fb5", "#15803d", "#c2410c", "#a21caf")


@dataclass(frozen=True)
class Course:
    """What a run did. `elsewhere`: the held-out loss of its adapter on the base as its files have it."""

    base: str
    losses: list[float]
    before: float
    after: float
    elsewhere: float


def write(work: Path, name: str, found: Sequence[Example], known: bool, most: int) -> Path:
    chosen = [example for example in found if (example.lesson in KNOWN) == known]
    write_examples(work / f"{name}.jsonl", chosen[:most])
    return work / f"{name}.jsonl"


def prepare(work: Path, steps: int, samples: int) -> None:
    """The base: a tiny model that has learnt something."""
    write_tiny(work / "random", vocabulary())
    many = examples(4 * steps * samples, seed=1, held_out=False)
    held_out = examples(600, seed=2, held_out=True)
    for known in (True, False):
        write(work, f"train-{known}", many, known, steps * samples)
        write(work, f"dev-{known}", held_out, known, 150)
    said = config(work, work / "random", known=True, steps=steps, samples=samples, rate=2e-3)
    said["adapt"] = {"method": "full"}
    said["precision"] = {"compute": "float32", "compile": "off"}
    train(RunConfig.model_validate(said), work / "first")
    export(work / "first", work / "base", merge_adapter=False, dtype=torch.float32)


def config(work: Path, model: Path, *, known: bool, steps: int, samples: int, rate: float) -> dict[str, Any]:
    return {
        "model": {"path": str(model), "dtype": "bfloat16"},
        "data": {
            "train": str(work / f"train-{known}.jsonl"),
            "dev": str(work / f"dev-{known}.jsonl"),
            "cache": str(work / "cache"),
        },
        "train": {"steps": steps, "step_samples": samples},
        "precision": {"compute": "bfloat16", "compile": "off"},
        "optim": {"learning_rate": rate, "betas": [0.9, 0.95], "warmup": 0.05},
        "evaluate": {"every": steps},
        "checkpoint": {"every": steps},
    }


def run(base: str, work: Path, steps: int, samples: int, rate: float) -> Course:
    said = config(work, work / "base", known=False, steps=steps, samples=samples, rate=rate)
    said["adapt"] = {"method": "lora", "rank": 8, "alpha": 16, "dropout": 0.05, "base": base}
    settings = RunConfig.model_validate(said)
    result = train(settings, work / base)
    dev = open_inputs(settings.data, work / "base").dev
    assert dev is not None
    model = open_model(work / base).model
    model.compute = torch.bfloat16
    return Course(
        base=base,
        losses=[
            float(str(e["loss"])) for e in read_events(work / base / "events.jsonl") if e["kind"] == "step"
        ],
        before=result.losses[0],
        after=result.losses[steps],
        elsewhere=held_out_loss(model, batches(dev, range(len(dev)), "pack", 2048)).mean,
    )


def table(courses: list[Course]) -> str:
    steps = len(courses[0].losses)
    tenth, points = max(1, steps // 10), (steps // 4, steps // 2, steps)
    head = ["base", *(f"loss at {point}" for point in points), "held-out before", "after", f"to {REFERENCE}"]
    head += ["apart, at most", "adapter on the files' base"]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    other = next(course for course in courses if course.base == REFERENCE)
    for course in courses:
        at = [f"{sum(course.losses[p - tenth : p]) / tenth:.4f}" for p in points]
        apart = max(abs(a - b) for a, b in zip(course.losses, other.losses, strict=True))
        row = [course.base, *at, f"{course.before:.4f}", f"{course.after:.4f}"]
        row += [f"{course.after - other.after:+.4f}", f"{apart:.4f}", f"{course.elsewhere:.4f}"]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def picture(courses: list[Course]) -> str:
    """Losses, each point the mean of a twentieth of the run."""
    width, height, left, low = 760, 360, 50, 320
    steps = len(courses[0].losses)
    each = max(1, steps // 20)
    highest = max(max(course.losses) for course in courses)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        "<title>Training loss on five bases</title>",
        "<style>svg { background: #fff; font: 13px system-ui, sans-serif; }</style>",
        f'<line x1="{left}" y1="{low}" x2="{width - 20}" y2="{low}" stroke="#9aa6b2"/>',
    ]
    for share in (0.0, 0.5, 1.0):
        x, y = left + share * (width - left - 20), low - share * (low - 50)
        parts.append(f'<text x="{x:.0f}" y="{low + 18}" text-anchor="middle">{round(share * steps)}</text>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{share * highest:.2g}</text>')
    for place, course in enumerate(courses):
        points: list[str] = []
        for first in range(0, steps, each):
            some = course.losses[first : first + each]
            x = left + (width - left - 20) * (first + len(some) / 2) / steps
            points.append(f"{x:.1f},{low - (low - 50) * sum(some) / len(some) / highest:.1f}")
        colour = COLOURS[place]
        parts.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="1.6" points="{" ".join(points)}"/>'
        )
        parts.append(f'<text x="{left + 110 * place}" y="24" fill="{colour}">{course.base}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def report(source: Origin, courses: list[Course], shown: str) -> str:
    steps = len(courses[0].losses)
    return "\n".join(
        [
            "# LoRA on a base kept in five ways\n",
            f"- {source.date}; {source.machine}",
            f"- `{source.command}`",
            f"- commit {source.commit}",
            "- " + ", ".join(f"{name} {version}" for name, version in source.versions.items()) + "\n",
            f"The demo's GLM-4 (4 layers of 128), which first learnt {', '.join(KNOWN)} in full. Then",
            f"an adapter (rank 8) learnt the other lessons for {steps} steps, the same samples in the",
            "same steps, products in bfloat16. A loss at a step is the mean of the tenth of the run before",
            "it. Held-out losses are on the base that was trained on, but for the last column: there the",
            "adapter stands on the model's files' weights, which is what `export --merge` writes.\n",
            table(courses),
            f"\n![losses]({shown})\n",
        ]
    )


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(words)
    torch.set_num_threads(given.threads)
    source = origin(
        ["python", "-m", "benchmarks.quantized.stability", *words], {"torch": str(torch.__version__)}
    )
    courses: list[Course] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(work, given.steps, given.samples)
        for base in BASES:
            courses.append(run(base, work, given.steps, given.samples, given.rate))
            print(f"{base}: held-out loss {courses[-1].after:.4f}", file=sys.stderr, flush=True)
    name = "quantized-stability"
    shown = f"{source.date[:10]}-{name}.svg"
    publish(
        given.out, name, source, report(source, courses, shown), {"courses": [asdict(c) for c in courses]}
    )
    (given.out / shown).write_text(picture(courses), encoding="utf-8")
    print(table(courses))


if __name__ == "__main__":
    main(sys.argv[1:])
