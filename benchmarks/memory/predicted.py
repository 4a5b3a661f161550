"""Predicted against measured memory of a step, over methods, lengths, recomputation, ranks and forms.

python -m benchmarks.memory.predicted [--only NAME ...] [--out DIR]

Predictions for GLM-4-9B follow, which are not measured here, and what more ranks need.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.memory.cases import FULL, LORA, MEASURED, PREDICTED
from benchmarks.memory.tracked import measure
from benchmarks.race.report import Origin, origin, publish
from glm_accelerate.memory.estimate import estimate
from glm_accelerate.memory.job import Estimate, Job

ABOUT = """\
Megabytes (10^6 bytes) of the rank that has the most. **measured**: bytes of tensors alive at the worst moment
of the second of two real steps of `train.step.update` on random weights: every allocation of torch's CPU
allocator (its profiler reports those of C++ extensions, too, but not their scratch memory that is no tensor;
gloo's copies of what it sends are left out), and what tensors borrow from numpy. Nothing is timed. On a GPU:
`torch.cuda.max_memory_allocated`. **predicted**: `memory.estimate` from the shapes alone. Its
terms were read from the source, and corrected where such measurements showed one missing; no number is fitted
but oneDNN's scratch memory for a product, which was measured by itself.
"""
BIG = """\
## GLM-4-9B on one GPU: predicted, not measured

GB (10^9 bytes) of everything, with what no allocator counts and is assumed (CUDA's context and kernels, 3 %
of fragmentation); *allocated*: what `torch.cuda.max_memory_allocated` would show. 1,024 tokens in one pass
unless it says otherwise; Triton kernels; *to hold*: published figures, or what is asked of us.
"""
MORE = """\
## More ranks never need more memory each

Megabytes a rank; weights, gradients and moments divided among all. Predicted; the first table has measured
pairs.
"""


@dataclass(frozen=True)
class Row:
    """A case with both figures."""

    name: str
    job: Job
    predicted: Estimate
    measured: int

    @property
    def error(self) -> float:
        return self.predicted.allocated / self.measured - 1


def run(name: str, job: Job) -> Row:
    with tempfile.TemporaryDirectory(prefix="predicted-") as folder:
        row = Row(name, job, estimate(job), measure(job, Path(folder)))
    print(f"{name}: {row.measured / 1e6:,.1f} MB, {row.error:+.1%}", file=sys.stderr, flush=True)
    return row


def table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| | form | tokens | recompute | ranks | predicted | measured | error | worst moment |",
        "| --- | --- | ---: | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        job, most = row.job, row.predicted
        lines.append(
            f"| {row.name} | {job.form} | {job.pass_tokens:,} | {job.recompute} | {job.ranks} "
            f"| {most.allocated / 1e6:,.1f} | {row.measured / 1e6:,.1f} | {row.error:+.1%} | {most.phase} |"
        )
    return lines


def breakdown(row: Row) -> list[str]:
    lines = [
        f"\nThe largest error, item by item: **{row.name}**\n",
        "| what | MB | why |",
        "| --- | ---: | --- |",
    ]
    items = (item for item in row.predicted.items if item.where == "device")
    return [*lines, *(f"| {item.what} | {item.bytes / 1e6:,.1f} | {item.why} |" for item in items)]


def large() -> list[str]:
    lines = [
        BIG,
        "| | predicted | allocated | worst moment | host | disk | to hold |",
        "| --- | ---: | ---: | --- | ---: | ---: | --- |",
    ]
    for name, (job, held) in PREDICTED.items():
        most = estimate(job)
        sizes = " | ".join(f"{size / 1e9:,.2f}" for size in (most.peak, most.allocated))
        lines.append(
            f"| {name} | {sizes} | {most.phase} | {most.host / 1e9:,.1f} | {most.disk / 1e9:,.1f} | {held} |"
        )
    return lines


def more_ranks() -> list[str]:
    lines = [MORE, "| | 1 | 2 | 4 | 8 |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, job in (("LoRA", LORA), ("full", FULL)):
        most = [estimate(replace(job, ranks=n, shards=n)).allocated for n in (1, 2, 4, 8)]
        lines.append(f"| {name} | " + " | ".join(f"{size / 1e6:,.1f}" for size in most) + " |")
    return lines


def page(source: Origin, rows: Sequence[Row]) -> str:
    worst = max(rows, key=lambda row: abs(row.error))
    return "\n".join(
        [
            "# Predicted against measured memory\n",
            f"- {source.date}; {source.machine}",
            f"- `{source.command}`",
            f"- commit {source.commit}",
            "- " + ", ".join(f"{name} {version}" for name, version in source.versions.items()),
            f"- {len(rows)} configurations; largest error {abs(worst.error):.1%} ({worst.name})\n",
            ABOUT,
            *table(rows),
            *breakdown(worst),
            "",
            *large(),
            "",
            *more_ranks(),
            "",
        ]
    )


def here(job: Job) -> Job | None:
    """As this machine runs it: on a GPU with Triton, one rank a GPU."""
    if not torch.cuda.is_available():
        return job
    if job.form == "eager" or job.ranks > torch.cuda.device_count():
        return None
    return replace(job, device="cuda", form="triton")


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Predicted against measured memory of a step.")
    parser.add_argument("--only", nargs="+", choices=list(MEASURED), help="some of the configurations")
    parser.add_argument("--out", type=Path, help="directory for the JSON and Markdown; default: only print")
    given = parser.parse_args(words)
    source = origin(["python", "-m", "benchmarks.memory.predicted", *words], {"torch": torch.__version__})
    jobs = {name: here(job) for name, job in MEASURED.items() if name in (given.only or MEASURED)}
    rows = [run(name, job) for name, job in jobs.items() if job is not None]
    text = page(source, rows)
    print(text)
    if given.out is not None:
        figures = [
            {
                "name": row.name,
                "measured": row.measured,
                "error": row.error,
                "predicted": asdict(row.predicted),
            }
            for row in rows
        ]
        publish(given.out, "memory-predicted", source, text, {"cases": figures})


if __name__ == "__main__":
    main(sys.argv[1:])
