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
from benchmarks.report import Origin, origin, page, publish, table
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


def measured_table(rows: Sequence[Row]) -> str:
    def cells(row: Row) -> Sequence[object]:
        job, most = row.job, row.predicted
        sizes = (f"{most.allocated / 1e6:,.1f}", f"{row.measured / 1e6:,.1f}", f"{row.error:+.1%}")
        where = (job.form, f"{job.pass_tokens:,}", job.recompute, job.ranks)
        return row.name, *where, *sizes, most.phase

    columns = "form, tokens, recompute, ranks, predicted, measured, error, worst moment"
    return table(("", *columns.split(", ")), map(cells, rows), left=(0, 1, 3, 8))


def breakdown(row: Row) -> str:
    items = (item for item in row.predicted.items if item.where == "device")
    cells = ((item.what, f"{item.bytes / 1e6:,.1f}", item.why) for item in items)
    return f"\nThe largest error, item by item: **{row.name}**\n\n" + table(
        ("what", "MB", "why"), cells, left=(0, 2)
    )


def large() -> str:
    def cells(name: str, job: Job, wanted: str) -> Sequence[str]:
        most = estimate(job)
        sizes = (f"{size / 1e9:,.2f}" for size in (most.peak, most.allocated))
        return name, *sizes, most.phase, f"{most.host / 1e9:,.1f}", f"{most.total('disk') / 1e9:,.1f}", wanted

    columns = "predicted, allocated, worst moment, host, disk, to hold"
    rows = (cells(name, *case) for name, case in PREDICTED.items())
    return table(("", *columns.split(", ")), rows, left=(0, 3, 6))


def more_ranks() -> str:
    counts = (1, 2, 4, 8)
    sizes = {
        name: [estimate(replace(job, ranks=n, shards=n)).allocated for n in counts]
        for name, job in (("LoRA", LORA), ("full", FULL))
    }
    return table(("", *counts), ((name, *(f"{x / 1e6:,.1f}" for x in each)) for name, each in sizes.items()))


def markdown(source: Origin, rows: Sequence[Row]) -> str:
    worst = max(rows, key=lambda row: abs(row.error))
    summary = f"{len(rows)} configurations; largest error {abs(worst.error):.1%} ({worst.name})"
    parts = [ABOUT, measured_table(rows), breakdown(worst), "", BIG, large(), "", MORE, more_ranks()]
    return page("Predicted against measured memory", source, [summary], *parts)


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
    figures = [
        {"name": row.name, "measured": row.measured, "error": row.error, "predicted": asdict(row.predicted)}
        for row in rows
    ]
    publish(given.out, "memory-predicted", source, markdown(source, rows), {"cases": figures})


if __name__ == "__main__":
    main(sys.argv[1:])
