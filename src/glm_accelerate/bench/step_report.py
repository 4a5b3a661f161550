"""The figures of `bench step` as a report, and two configs side by side."""

from dataclasses import asdict

from glm_accelerate.bench.breakdown import Breakdown
from glm_accelerate.bench.report import Report, Table, now, percent
from glm_accelerate.bench.step import StepFigures
from glm_accelerate.observe.chart import Bar
from glm_accelerate.runtime.words import amount, duration, number

LISTED = 15  # operators by name; the others are one line


def step_report(figures: StepFigures, config: str) -> Report:
    """Speed, memory, and where the time of a step goes."""
    machine, spent = figures.machine, figures.breakdown
    sheet = figures.utilisation_of_data_sheet
    rows = [
        ("tokens a second", number(figures.tokens_per_second)),
        ("samples a second", number(figures.samples_per_second)),
        ("a step", duration(figures.step_seconds)),
        ("processor time a step", duration(figures.cpu_seconds)),
        ("waiting for data a step", duration(figures.waited_seconds)),
        ("first step", duration(figures.first_seconds)),
        ("padding", percent(figures.padding)),
        ("model FLOP/s", number(figures.flops_per_second / 1e12, "T")),
        (f"measured peak, {figures.peak.dtype} products", number(figures.peak.measured / 1e12, "T")),
        ("FLOP utilisation, of the measured peak", percent(figures.utilisation)),
        *([("FLOP utilisation, of the data sheet", percent(sheet))] if sheet is not None else []),
        ("peak memory", amount(figures.memory_bytes)),
        ("peak memory above the start", amount(figures.memory_above_start)),
        ("compiled in the warm-up", f"{figures.compilations}"),
        ("compiled again after it", f"{figures.recompilations}"),
        *(
            [("waits for the device in a step", f"{spent.synchronisations}")]
            if spent.synchronisations is not None
            else []
        ),
    ]
    timed = "kernels of the GPU" if spent.kernels else "operators on the CPU"
    model = f"{figures.parameters / 1e6:,.4g} M parameters, {figures.trained / 1e6:,.3g} M trained"
    return Report(
        name="step",
        title=f"Training steps of {config}",
        about=(
            f"{now()}; {machine.device}, {machine.threads} threads",
            f"torch {machine.torch}, Python {machine.python}",
            f"{model} ({figures.method}), products in {figures.compute}",
            f"medians of {len(figures.steps)} steps after the warm-up; the breakdown is of one more step, "
            f"which took {duration(spent.seconds)} under the profiler, by the time of {timed}",
        ),
        tables=(
            Table("Figures", ("", "median"), tuple(rows)),
            Table("One step", ("what", "time", "share"), tuple(_classes(spent))),
            Table("Operators", ("operator", "class", "calls", "time", "share"), tuple(_operators(spent))),
        ),
        picture=tuple(Bar(kind, taken, percent(spent.share(kind))) for kind, taken in spent.classes.items()),
        figures={"config": config, "date": now(), **asdict(figures)},
    )


def _classes(spent: Breakdown) -> list[tuple[str, str, str]]:
    """Of what is in the step at all."""
    classes = {kind: taken for kind, taken in spent.classes.items() if taken}
    return [(kind, duration(taken), percent(spent.share(kind))) for kind, taken in classes.items()]


def _operators(spent: Breakdown) -> list[tuple[str, ...]]:
    named, others = spent.operators[:LISTED], spent.operators[LISTED:]
    rows = [
        (
            _short(one.name),
            one.kind,
            f"{one.calls:,}",
            duration(one.seconds),
            percent(one.seconds / spent.seconds),
        )
        for one in named
    ]
    if others:
        taken = sum(one.seconds for one in others)
        calls = sum(one.calls for one in others)
        rows.append(
            (f"{len(others)} others", "", f"{calls:,}", duration(taken), percent(taken / spent.seconds))
        )
    return rows


def _short(name: str) -> str:
    return name if len(name) <= 80 else f"{name[:77]}..."
