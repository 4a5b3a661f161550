"""Two configs in turn, A B A B ..., each time in a process of its own: the machine's drift meets both alike,
and neither finds memory, caches or compiled code that the other left in its process.
"""

import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from glm_accelerate.bench.report import Report, Table, now
from glm_accelerate.bench.run import Say
from glm_accelerate.config.load import to_yaml
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.observe.chart import Bar
from glm_accelerate.runtime.errors import ExitCode, UserError
from glm_accelerate.runtime.words import number

MOMENT = 10.0  # seconds for a child to end when we are stopped
# key in a child's JSON, its name in the report, its unit, the divisor
SHOWN = (
    ("tokens_per_second", "tokens a second", "", 1.0),
    ("samples_per_second", "samples a second", "", 1.0),
    ("cpu_seconds", "processor time a step", "s", 1.0),
    ("utilisation", "FLOP utilisation", "%", 0.01),
    ("memory_bytes", "peak memory", "MiB", 2.0**20),
    ("memory_above_start", "peak memory above the start", "MiB", 2.0**20),
    ("padding", "padding", "%", 0.01),
    ("first_seconds", "first step", "s", 1.0),
)

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Side:
    """A config and what to call it."""

    name: str
    config: RunConfig


def compare(
    sides: tuple[Side, Side], rounds: int, command: Sequence[str], say: Say
) -> list[tuple[Figures, Figures]]:
    """The figures of both, round by round. `command` measures the config whose file is put behind it."""
    with tempfile.TemporaryDirectory(prefix="glm-accelerate-bench-") as directory:
        files: list[Path] = []
        for letter, side in zip("ab", sides, strict=True):
            files.append(Path(directory) / f"{letter}.yaml")
            files[-1].write_text(to_yaml(side.config), encoding="utf-8")
        measured: list[Figures] = []
        for turn in range(2 * rounds):
            say(f"{'AB'[turn % 2]}, round {turn // 2 + 1}", turn, 2 * rounds)
            measured.append(_child([*command, str(files[turn % 2])]))
    return list(zip(measured[::2], measured[1::2], strict=True))


def _child(command: Sequence[str]) -> Figures:
    """The figures that it prints; its progress and its errors go where ours go."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        output, _ = child.communicate()
    except BaseException:
        child.terminate()
        child.communicate(timeout=MOMENT)
        raise
    if child.returncode == ExitCode.STOPPED:
        raise KeyboardInterrupt
    if child.returncode:
        error = UserError("one of the two could not be measured")
        error.reported = True  # by the child
        if child.returncode == ExitCode.USERS_INPUT:
            raise error
        raise RuntimeError(f"{error}: {child.returncode}")
    return json.loads(output)


def compare_report(sides: tuple[Side, Side], rounds: Sequence[tuple[Figures, Figures]]) -> Report:
    """Medians of both, and the median of B / A over the rounds: neighbours in time."""
    rows: list[tuple[str, ...]] = []
    for key, shown, unit, scale in SHOWN:
        pairs = [(a[key] / scale, b[key] / scale) for a, b in rounds]
        ratios = [b / a for a, b in pairs if a]
        a, b = (number(median(pair[side] for pair in pairs), unit) for side in (0, 1))
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}" if ratios else ""
        rows.append((shown, a, b, f"{median(ratios):.3f}" if ratios else "", spread))
    machine = rounds[0][0]["machine"]
    speeds = [median(pair[side]["tokens_per_second"] for pair in rounds) for side in (0, 1)]
    return Report(
        name="compare",
        title=f"{sides[0].name} (A) and {sides[1].name} (B)",
        about=(
            f"{now()}; {machine['device']}, {machine['threads']} threads, torch {machine['torch']}",
            f"{len(rounds)} rounds, A and B in turn, each in a process of its own; medians",
        ),
        tables=(Table("B beside A", ("", "A", "B", "B / A", "smallest to largest"), tuple(rows)),),
        picture=tuple(
            Bar(letter, speed, f"{number(speed)} tokens/s")
            for letter, speed in zip("AB", speeds, strict=True)
        ),
        figures={"a": sides[0].name, "b": sides[1].name, "rounds": [list(pair) for pair in rounds]},
    )
