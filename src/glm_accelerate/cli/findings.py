"""The findings of one evaluation: a table, and in words what the samples are enough for."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from glm_accelerate.evaluate.protocol.messages import to_json
from glm_accelerate.observe.figures import FEWEST_TO_COMPARE, above_zero, compared, metric
from glm_accelerate.runtime.screen import say

if TYPE_CHECKING:
    from glm_accelerate.evaluate.protocol.messages import EvaluationResult, Findings
    from glm_accelerate.evaluate.statistics.intervals import Interval

FLOAT32 = "float32 differs by"  # in a result's `by`: the difference that reduced precision makes
ENOUGH = {
    "better": ", enough to choose between the two",
    "worse": ", enough to choose between the two",
    "tied": ", enough to take the two as equal",
}  # where it is undecided, that says it
COLUMNS = ("metric", "value", "95 % interval", "samples")


def show(findings: "Findings", console: Console) -> None:
    result = findings.result
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "metric" else "right", overflow="fold")
    if result.loss is not None:
        samples = f"{result.samples:,} of {result.total:,}"
        interval = above_zero(result.ci95)
        ends = None if interval is None else (_perplexity(interval[0]), _perplexity(interval[1]))
        table.add_row("loss", f"{result.loss:.4f}", _between(interval), samples)
        table.add_row(
            "perplexity", f"{_perplexity(result.loss):.4g}", _between(ends, "{:.4g}".format), samples
        )
    for name, value in result.metrics.items():
        answered = f"{len(findings.predictions):,} of {result.total:,}"
        table.add_row(Text(name), metric(value), _between(result.intervals.get(name), metric), answered)
    console.print(table)
    for line in _words(result):
        say(console, line)


def as_json(findings: "Findings", path: str) -> str:
    fields, by = to_json(findings.result), dict(findings.result.by)
    fields |= {"by": by, "answers": len(findings.predictions)}
    if (difference := by.pop(FLOAT32, None)) is not None:
        fields["float32_difference"] = float(difference)
    return json.dumps({"path": path, **fields}, ensure_ascii=False, indent=2, allow_nan=False)


def _words(result: "EvaluationResult") -> list[str]:
    where = " in ".join(result.by[key] for key in ("device", "dtype") if key in result.by)
    words = [f"{result.seconds:,.1f} s on {where}. {enough(result)}"]
    if result.against is not None:
        low, high = result.against.interval
        span = f" (95 %: {low:+.4f} to {high:+.4f})" if low < high else ""
        words.append(f"{compared(asdict(result.against))}{span}{ENOUGH.get(result.against.verdict, '')}")
    if (difference := result.by.get(FLOAT32)) is not None:
        words.append(
            f"On a few samples the loss in {result.by['dtype']} and in float32 differ by {difference}."
        )
    if result.reason is not None:
        words.append(f"Not measured: {result.reason}")
    return words


def enough(result: "EvaluationResult") -> str:
    """What the samples are enough for, and what not."""
    left_out = f" ({result.by['left_out']} left out)" if "left_out" in result.by else ""
    if result.fewest >= result.total:
        return (
            f"All {result.total:,} samples{left_out}: exact for these; other text would give other figures."
        )
    compare = f"Enough to compare steps on the same {result.samples:,}; for"
    return (
        f"Intervals are for the figure of all {result.total:,} samples{left_out}. "
        f"{compare if result.samples >= FEWEST_TO_COMPARE else 'For'} a figure to publish: --samples all"
    )


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


def _between(interval: "Interval | None", write: Callable[[float], str] = "{:.4f}".format) -> str:
    if interval is None:
        return ""
    low, high = interval
    return "exact" if low == high else f"{write(low)} to {write(high)}"
