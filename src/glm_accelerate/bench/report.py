"""The report of a bench, for people (Markdown with a picture) and for programs (JSON)."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm_accelerate.observe.chart import Bar, bars
from glm_accelerate.runtime.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as they are shown. The first column is text, the others are numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Report:
    """One bench: its tables, notes on them, its picture, and the raw figures."""

    name: str  # of the files: bench-<name>
    title: str
    about: tuple[str, ...]  # one line each
    tables: tuple[Table, ...]
    picture: tuple[Bar, ...]
    figures: dict[str, Any]


def as_json(report: Report) -> str:
    """Strict JSON: a figure that is not finite is null."""
    return json.dumps(_strict(report.figures), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def show(report: Report, console: "Console") -> None:
    """On a terminal. Names come from files, so nothing in them is read as markup."""
    from rich.table import Table as Grid  # here: figures are measured where rich is not, too
    from rich.text import Text

    console.print(Text(report.title, "bold"))
    for line in report.about:
        console.print(Text(f"  {line}", "dim"))
    for table in report.tables:
        shown = Grid(title=Text(table.title, "bold"), title_justify="left", box=None, pad_edge=False)
        for place, column in enumerate(table.columns):
            shown.add_column(Text(column), justify="right" if place else "left")
        for row in table.rows:
            shown.add_row(*map(Text, row))
        console.print("", shown)


def markdown(report: Report) -> str:
    """The page; its picture lies beside it."""
    lines = [f"# {report.title}", "", *(f"- {line}" for line in report.about)]
    if report.picture:
        lines += ["", f"![{report.title}](bench-{report.name}.svg)"]
    for table in report.tables:
        rule = ["---", *["---:"] * (len(table.columns) - 1)]
        rows = (table.columns, rule, *table.rows)
        lines += ["", f"## {table.title}", "", *(f"| {' | '.join(map(_cell, row))} |" for row in rows)]
    return "\n".join(lines) + "\n"


def write(report: Report, directory: Path) -> None:
    """bench-<name>.md, .json and .svg."""
    texts = {"md": markdown(report), "json": as_json(report)}
    if report.picture:
        texts["svg"] = bars(report.picture, report.title)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for ending, text in texts.items():
            (directory / f"bench-{report.name}.{ending}").write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write the report: {error.strerror}", where=directory) from error


def now() -> str:
    """The day and minute of a figure."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _strict(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_strict(each) for each in value]
    return value
