"""`bench kernels`: each operator of a config's model in the form that trains and by definition, timed in turn
and compared with float64: time, bytes, error.
"""

from dataclasses import asdict, dataclass

from glm_accelerate.bench.judge import FEW_TOKENS, OperatorFigures, bandwidth, judged
from glm_accelerate.bench.report import Report, Table, now, percent
from glm_accelerate.bench.run import Say, ready
from glm_accelerate.bench.step import machine
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.observe.chart import Bar
from glm_accelerate.runtime.words import amount, duration

MOST_LOGITS = 2**29  # of the cross-entropy by definition, which makes them all at once


@dataclass(frozen=True, slots=True)
class KernelFigures:
    """All operators, and the device's bandwidth."""

    device: str
    compute: str
    documents: tuple[int, ...]
    targets: int
    bandwidth: float  # bytes a second that a large copy reads and writes
    operators: tuple[OperatorFigures, ...]


def measure_kernels(config: RunConfig, rounds: int, say: Say) -> KernelFigures:
    """At the shapes of the run's first pass."""
    with ready(config, 1, say) as prepared:
        run = prepared.run
        batch = next(run.steps).batches[0]
        lengths = tuple(length for row in batch.documents for length in row)
        targets = max(2, min(batch.targets, MOST_LOGITS // run.model.sizes.vocabulary))
        results: list[OperatorFigures] = []
        for figures in judged(run.model, lengths, targets, rounds):
            results.append(figures)
            say(f"measured {figures.name}", len(results), len(results))
        return KernelFigures(
            device=machine(run).device,
            compute=run.plan.compute,
            documents=lengths,
            targets=targets,
            bandwidth=bandwidth(run.device),
            operators=tuple(results),
        )


def kernels_report(figures: KernelFigures, config: str) -> Report:
    """A line an operator."""
    rows = [
        (
            one.name,
            duration(one.seconds),
            duration(one.reference_seconds),
            f"{one.reference_seconds / one.seconds:.2f}",
            amount(one.bytes),
            percent(one.bytes / one.seconds / figures.bandwidth),
            f"{one.error:.1e}",
            f"{one.reference_error:.1e}",
        )
        for one in figures.operators
    ]
    columns = (
        "operator",
        "time",
        "by definition",
        "faster",
        "bytes",
        "of bandwidth",
        "error",
        "of definition",
    )
    count, longest = len(figures.documents), max(figures.documents)
    return Report(
        name="kernels",
        title=f"Operators of {config}",
        about=(
            f"{now()}; {figures.device}; a copy reads and writes {amount(figures.bandwidth)}/s",
            f"{sum(figures.documents):,} tokens in {count:,} documents, the longest {longest:,}; "
            f"{figures.targets:,} targets; activations in {figures.compute}",
            "forward and backward together; the definition has no dropout; "
            "bytes: each number read or written once a pass",
            f"errors: against float64 on {FEW_TOKENS} tokens without dropout, of the largest number",
        ),
        tables=(Table("Operators", columns, tuple(rows)),),
        picture=tuple(Bar(one.name, one.seconds, duration(one.seconds)) for one in figures.operators),
        figures={"config": config, "date": now(), **asdict(figures)},
    )
