"""The result of a benchmark as people read it (Markdown) and as programs do (JSON), with all that is needed
to run it again: date, machine, command, commit and versions.
"""

import json
import os
import platform
import subprocess
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Origin:
    """Where figures come from."""

    date: str
    machine: str
    load: float
    command: str
    commit: str
    versions: dict[str, str]


def origin(command: Sequence[str], versions: dict[str, str]) -> Origin:
    return Origin(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        machine=machine(),
        load=os.getloadavg()[0],
        command=" ".join(Path(word).name if Path(word).is_absolute() else word for word in command),
        commit=commit(),
        versions={"python": platform.python_version(), **versions},
    )


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB memory"


def commit() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    name = git("rev-parse", "HEAD") or "none"
    changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results")  # what was measured before
    return name + (" with uncommitted changes" if changed else "")


def page(title: str, source: Origin, facts: Iterable[str], *parts: str) -> str:
    """A report in Markdown: where it comes from, facts as a list, then its parts."""
    started = f"{source.date}; {source.machine}; load when it began {source.load:.1f}"
    items = [started, f"`{source.command}`", f"commit {source.commit}", named(source.versions), *facts]
    return "\n".join([f"# {title}\n", *(f"- {item}" for item in items), "", *parts]) + "\n"


def named(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def table(headings: Sequence[str], rows: Iterable[Sequence[object]], left: Collection[int] = (0,)) -> str:
    """In Markdown; columns that are not in `left` hold numbers."""
    marks = ["---" if column in left else "---:" for column in range(len(headings))]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (headings, marks, *rows))


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The median, smallest and largest."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def publish(out: Path | None, name: str, source: Origin, text: str, figures: dict[str, Any]) -> None:
    """Prints the page; into `out` go the page and the figures as JSON, named by their day."""
    print(text)
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    stem = out / f"{source.date[:10]}-{name}"
    stem.with_suffix(".md").write_text(text, encoding="utf-8")
    content = {"origin": asdict(source), **figures}
    stem.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
