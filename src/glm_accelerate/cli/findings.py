"""What one evaluation found: a table, and in words what the samples are enough for."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from glm_accelerate.evaluate.looks import ENOUGH
from glm_accelerate.observe.figures import compared, metric

if TYPE_CHECKING:
    from glm_accelerate.evaluate.exam import Findings
    from glm_accelerate.evaluate.results import Interval, Result

COLUMNS = ("metric", "value", "95 % interval", "samples")


def show(findings: "Findings", console: Console) -> None:
    """For a person."""
    result = findings.result
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "metric" else "right", overflow="fold")
    if result.loss is not None:
        samples = f"{result.samples:,} of {result.total:,}"
        ends = None if result.ci95 is None else (_perplexity(result.ci95[0]), _perplexity(result.ci95[1]))
        table.add_row("loss", f"{result.loss:.4f}", _between(result.ci95), samples)
        table.add_row(
            "perplexity", f"{_perplexity(result.loss):.4g}", _between(ends, "{:.4g}".format), samples
        )
    for name, value in result.metrics.items():
        asked = f"{len(findings.predictions):,} of {result.total:,}"
        table.add_row(Text(name), metric(value), _between(result.intervals.get(name), metric), asked)
    console.print(table)
    for line in _words(result):
        console.print(Text(line), soft_wrap=True, highlight=False)


def as_json(findings: "Findings", path: str) -> str:
    """For a program."""
    said: Mapping[str, object] = asdict(findings.result)
    return json.dumps(
        {"path": path, **said, "answers": len(findings.predictions)}, ensure_ascii=False, indent=2
    )


def _words(result: "Result") -> list[str]:
    where = " in ".join(result.by[key] for key in ("device", "dtype") if key in result.by)
    words = [f"{result.seconds:,.1f} s on {where}. {enough(result)}"]
    if result.against is not None:
        words.append(f"{compared(asdict(result.against))}, {ENOUGH[result.against.verdict]}")
    for key, said in result.by.items():
        if key.startswith("float32"):
            words.append(
                f"On a few samples the loss in {result.by['dtype']} and in float32 differ by {said}."
            )
    if result.reason is not None:
        words.append(f"Not measured: {result.reason}")
    return words


def enough(result: "Result") -> str:
    """What the samples are enough for, and what not."""
    if result.samples >= result.total:
        return f"All {result.total:,} samples: exact for these, not for other text."
    return (
        f"Intervals are for the figure of all {result.total:,} samples. Enough to compare steps on the same "
        f"{result.samples:,}; for a figure to publish: --samples all"
    )


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


def _between(interval: "Interval | None", write: Callable[[float], str] = "{:.4f}".format) -> str:
    if interval is None:
        return ""
    low, high = interval
    return "exact" if low == high else f"{write(low)} to {write(high)}"
