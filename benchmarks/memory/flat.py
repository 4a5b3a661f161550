"""Memory over many steps of long-tailed samples: ours, whose largest passes run first, beside the stock way.

python -m benchmarks.memory.flat [--data TRAIN.jsonl] [--steps 300] [--method lora] [--out DIR]

The same samples in the same steps, each side a process of its own, one after the other. Without --data,
conversations of words drawn at random, as long as a log-normal distribution says.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.child import result
from benchmarks.memory.flat_picture import SIDES, curves
from benchmarks.memory.live import build_counter
from benchmarks.race.draw import in_order, tokens_of
from benchmarks.race.job import Job, Method
from benchmarks.race.ours import config_of
from benchmarks.race.prepare_model import TINY, WORDS, Shape, prepare_model
from benchmarks.race.samples import read_samples, write_samples
from benchmarks.report import Origin, origin, page, publish, table
from glm_accelerate.data.inputs import open_inputs

SMALL = Shape(hidden=256, layers=4, ffn=856, heads=4, kv_heads=2, head_dim=64)
LEAST = 2**20  # bytes by which a peak has to exceed all before it to count as grown

ABOUT = """\
MB are 10^6 bytes. **alive**: handed out by malloc and not taken back, counted exactly in front of it
(`benchmarks/memory/live.c`), tensors and everything else, above what lived when the model was loaded.
**resident**: the most pages of a step (VmHWM, set back after each step), of the whole process. **grew**:
steps after the first whose peak was more than 1 MiB above all before. **swing**: largest to smallest peak.

**Stock** is `benchmarks/race/stock.py`: HF Trainer and PEFT as the fine-tune script has them, each batch
padded to its longest sample. **Ours** is `train` as shipped. The samples of every step are the same. Ours
counts its rehearsal into the first step: what it will need at most it takes there, and keeps.
"""


@dataclass(frozen=True)
class Peaks:
    """What a course of peaks comes to, in bytes."""

    first: int
    later: int  # the most after the first step
    grew: int
    swing: float
    last_growth: int  # the step; 1 if none after the first


def peaks(values: Sequence[int]) -> Peaks:
    """Of one value a step."""
    most, grown = values[0], [1]
    for step, value in enumerate(values[1:], 2):
        if value > most + LEAST:
            grown.append(step)
        most = max(most, value)
    swing = max(values) / max(1, min(values))
    return Peaks(values[0], max(values[1:]), len(grown) - 1, swing, grown[-1])


@dataclass(frozen=True)
class Side:
    """What one side measured, in bytes, one entry a step."""

    live: list[int]
    high: list[int]
    resident: list[int]
    loaded: int
    said: list[str]
    versions: dict[str, str]

    @property
    def alive(self) -> list[int]:
        """Above what lived before the first step."""
        return [value - self.loaded for value in self.live]


def draw_conversations(path: Path, count: int, median: int, seed: int) -> None:
    """`count` conversations of about `median` words, a few of them twenty times as long."""
    draw = np.random.default_rng(seed)
    words = ["".join(draw.choice(list("abcdefghilmnoprstu"), 2 + number % 7)) for number in range(600)]
    lines: list[str] = []
    for length in draw.lognormal(np.log(median), 1.0, count).astype(int):
        text = [" ".join(draw.choice(words, max(1, part))) for part in (length // 3, length - length // 3)]
        turns = zip(("user", "assistant"), text, strict=True)
        lines.append(json.dumps({"messages": [{"role": role, "content": part} for role, part in turns]}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def run(side: str, job: Job, work: Path, counter: Path) -> Side:
    """In a fresh process."""
    mine = replace(job, export=str(work / side))
    module, preload = f"benchmarks.memory.flat_{side}", {"LD_PRELOAD": str(counter)}
    return result(module, mine, Side, work, threads=job.threads, environment=preload)


def prepare(given: argparse.Namespace, work: Path) -> Job:
    """Model and samples, the same for both."""
    data = given.data
    if data is None:
        data = work / "drawn.jsonl"
        draw_conversations(data, given.steps * given.batch, 120, given.seed)
    shape = TINY if given.tiny else SMALL
    prepare_model(data, work / "model", 300 if given.tiny else WORDS, shape=shape)
    job = Job(
        model=str(work / "model"),
        data=str(data.resolve()),
        train=str(work / "train.npz"),
        cache=str(work / "cache"),
        export=str(work),
        method=given.method,
        batch=given.batch,
        steps=given.steps,
        max_tokens=given.max_tokens,
        seed=given.seed,
        threads=given.threads,
        compile=not given.tiny,
    )
    config = config_of(job)
    inputs = open_inputs(config.data, Path(job.model))
    write_samples(Path(job.train), tokens_of(inputs.train, in_order(job, config, inputs)))
    return job


def rows(sides: Sequence[Side]) -> Iterator[Sequence[str]]:
    """Stock and ours side by side."""
    for name, courses in (("alive", [s.alive for s in sides]), ("resident", [s.high for s in sides])):
        summaries = [peaks(course) for course in courses]
        for what, figures in (
            ("peak of the first step, MB", [f"{p.first / 1e6:,.0f}" for p in summaries]),
            ("largest peak after it, MB", [f"{p.later / 1e6:,.0f}" for p in summaries]),
            ("... to the first", [f"{p.later / p.first:.3f}" for p in summaries]),
            ("steps in which the peak grew", [str(p.grew) for p in summaries]),
            ("the last of them", ["none" if p.last_growth == 1 else str(p.last_growth) for p in summaries]),
            ("swing", [f"{p.swing:.2f}" for p in summaries]),
        ):
            yield f"{name}: {what}", *figures


def markdown(source: Origin, job: Job, parameters: int, sides: Sequence[Side], picture: str) -> str:
    lengths = np.array([len(sample.tokens) for sample in read_samples(Path(job.train))])
    tail = f"median {np.median(lengths):,.0f}, 99th percentile {np.percentile(lengths, 99):,.0f}"
    model = (
        f"GLM-4 0414, {parameters / 1e6:.1f} M parameters, {job.method}; {job.steps} steps of "
        f"{job.batch} samples of {lengths.min()} to {lengths.max():,} tokens ({tail})"
    )
    return page(
        "Memory over many steps",
        source,
        [model],
        ABOUT,
        table(("", "stock", "ours"), rows(sides)),
        "",
        *(f"Ours at its start: {said}." for said in sides[1].said if "largest pass" in said),
        f"\n![memory of both]({picture})",
    )


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory.flat", description=__doc__)
    parser.add_argument("--data", type=Path, help="JSONL with messages (default: drawn)")
    methods: tuple[Method, ...] = ("lora", "full")
    parser.add_argument("--method", choices=methods, default="lora")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=4, help="samples in a step")
    parser.add_argument("--max-tokens", type=int, default=1024, help="longest sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a model of 30 thousand parameters: for tests")
    parser.add_argument("--out", type=Path, help="directory for results; default: only print")
    given = parser.parse_args(words)
    source = origin(["python", "-m", "benchmarks.memory.flat", *words], {"torch": torch.__version__})
    with tempfile.TemporaryDirectory(prefix="flat-") as folder:
        work = Path(folder)
        job = prepare(given, work)
        counter = build_counter(work)
        sides = [run(side, job, work, counter) for side in SIDES]
        source = replace(source, versions={**source.versions, **sides[0].versions})
        parameters = json.loads((work / "model" / "made.json").read_text())["parameters"]
        name = f"memory-flat-{given.method}"
        picture = f"{source.date[:10]}-{name}.svg"
        text = markdown(source, job, parameters, sides, picture)
    figures = {side: asdict(measured) for side, measured in zip(SIDES, sides, strict=True)}
    publish(given.out, name, source, text, figures)
    if given.out is not None:
        drawn = [[value / 1e6 for value in side.high] for side in sides]
        title = f"Resident memory over {given.steps} steps"
        (given.out / picture).write_text(curves(*drawn, title, "MB"), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
