"""What recomputation costs and saves: our plans against all or nothing, the square-root rule, and torch's own
compile-time budget, on a 24-layer GLM-4-0414 of random weights.

python -m benchmarks.memory.recompute [--methods full lora] [--rounds 3] [--out DIR]

Every setting runs in a process of its own, in turn, round after round.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.memory.recompute_picture import Line, picture
from benchmarks.memory.recompute_side import Size, Task, Took
from benchmarks.race.report import Origin, origin, publish
from glm_accelerate.memory.chain import BlockCosts, BlockOption, Plan, Segment, cost, keep_of
from glm_accelerate.memory.recompute import choose

ROOT = Path(__file__).resolve().parents[2]
PARTS = (0.85, 0.75, 0.66, 0.55, 0.4)  # of what keeping everything takes: our budgets
BUDGETS = (1.0, 0.5)  # torch's
AIM = (0.68, 1.10)  # of memory and time

ABOUT = """\
A pass is forward and backward of all rows; the optimizer is left out. **Memory**: the most bytes of tensors
beyond those that were there before the pass, gradients included, as torch's allocator counts them, once.
**Process**: the most that its resident memory grew in the timed passes. **Time**: the median pass; ratios are
taken within a round against the same side with nothing recomputed, and their median is shown. **Same**: loss
and the sum of each gradient are those of nothing recomputed, to the last bit.

- `ours`: one block and the loss were measured once, in a process of its own; the plan of least time under
  each budget, by operator and by block. `foretold` is what the plan said it would take.
- `every block`, `square root`: each block, or segments of the square root of all, keep only their input.
- `torch`: the same block in PyTorch's own operators, each compiled, under
  `torch._functorch.config.activation_memory_budget`; weights are cast where they are used.
"""


@dataclass(frozen=True)
class Setting:
    """A line of the table."""

    side: str
    name: str
    plan: Plan | None = None
    budget: float | None = None
    foretold: tuple[float, float] | None = None  # memory as a part of everything, seconds


@dataclass(frozen=True)
class Row:
    """What came of a setting; ratios to the same side with nothing recomputed."""

    side: str
    name: str
    bytes: int
    memory: float
    resident: int
    seconds: float
    time: float
    spread: tuple[float, float]
    same: bool
    foretold: tuple[float, float] | None


def run(task: Task) -> dict[str, Any]:
    """In a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "task.json"
        said.write_text(json.dumps(asdict(task)))
        words = [sys.executable, "-m", "benchmarks.memory.recompute_side", str(said)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def settings(chain: Sequence[BlockCosts], budgets: Sequence[float]) -> list[Setting]:
    """Everything first, on both sides: the others are compared with it."""
    last, count = chain[-1], len(chain) - 1

    def with_loss(plan: Plan) -> Plan:
        return Plan((*plan.segments, Segment(1, last.options[0].keep)))

    everything = cost(chain, Plan.everything(len(chain))).peak
    found = [Setting("ours", "nothing recomputed", Plan.everything(len(chain)))]
    for part in PARTS:
        point = choose(chain, int(part * everything))
        if point is not None:
            foretold = (point.cost.peak / everything, point.cost.seconds)
            found.append(Setting("ours", f"{100 * part:.0f} %", point.plan, foretold=foretold))
    for name, plan in (("every block", Plan.each(count)), ("square root", Plan.rooted(count))):
        whole = with_loss(plan)
        foretold = (cost(chain, whole).peak / everything, cost(chain, whole).seconds)
        found.append(Setting(name, name, whole, foretold=foretold))
    found += [Setting("torch", f"budget {budget:g}", budget=budget) for budget in budgets]
    return found


def measure(method: str, size: Size, threads: int, rounds: int, budgets: Sequence[float]) -> list[Row]:
    said = run(Task(size, method, threads, measures=True))
    block, loss = (block_of(each) for each in said["chain"])
    asked = settings([block] * size.layers + [loss], budgets)
    results: list[list[Took]] = []
    for nth in range(rounds):
        results.append([])
        for setting in asked:
            plan = None if setting.plan is None else asdict(setting.plan)
            took = Took(**run(Task(size, method, threads, plan, setting.budget, tracks=nth == 0)))
            results[-1].append(took)
            print(
                f"{method}, round {nth + 1}: {setting.side} {setting.name}: "
                f"{took.bytes / 1e6:.0f} MB, {1e3 * took.seconds:.0f} ms",
                file=sys.stderr,
            )
    return rows(asked, results)


def rows(asked: Sequence[Setting], results: Sequence[Sequence[Took]]) -> list[Row]:
    found: list[Row] = []
    for place, setting in enumerate(asked):
        base = next(
            i for i, other in enumerate(asked) if (other.side == "torch") == (setting.side == "torch")
        )
        pairs = [(each[place], each[base]) for each in results]
        ratios = [own.seconds / other.seconds for own, other in pairs]
        own, other = pairs[0]
        found.append(
            Row(
                setting.side,
                setting.name,
                own.bytes,
                own.bytes / other.bytes,
                int(median(took.resident for took, _ in pairs)),
                median(took.seconds for took, _ in pairs),
                median(ratios),
                (min(ratios), max(ratios)),
                all(a.loss == b.loss and a.digest == b.digest for a, b in pairs),
                setting.foretold,
            )
        )
    return found


def block_of(said: dict[str, Any]) -> BlockCosts:
    """What `asdict` made."""
    options = tuple(BlockOption(**(each | {"keep": keep_of(each["keep"])})) for each in said["options"])
    made: dict[str, Any] = {**said, "options": options}
    return BlockCosts(**made)


def table(found: Sequence[Row]) -> str:
    lines = [
        "| side | setting | memory, MB | of all | foretold | process, MB "
        "| time, ms | of all | foretold | same |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    base = found[0]
    for row in found:
        memory = f"{100 * row.foretold[0]:.0f} %" if row.foretold else ""
        time = f"{100 + 100 * row.foretold[1] / base.seconds:.0f} %" if row.foretold else ""
        lines.append(
            f"| {row.side} | {row.name} | {row.bytes / 1e6:,.0f} | {100 * row.memory:.0f} % | {memory} "
            f"| {row.resident / 1e6:,.0f} | {1e3 * row.seconds:,.0f} "
            f"| {100 * row.time:.1f} % ({100 * row.spread[0]:.0f} to {100 * row.spread[1]:.0f}) | {time} "
            f"| {'yes' if row.same else 'no'} |"
        )
    return "\n".join(lines)


def verdict(found: Sequence[Row]) -> str:
    """Whether the aim is met by one of our plans."""
    met = [row for row in found if row.side == "ours" and row.memory <= AIM[0] and row.time <= AIM[1]]
    aim = f"at least {100 - 100 * AIM[0]:.0f} % less memory at most {100 * AIM[1] - 100:.0f} % more time"
    if not met:
        return f"Aim missed: {aim}."
    best = min(met, key=lambda row: row.memory)
    return (
        f"Aim met ({aim}): {100 - 100 * best.memory:.0f} % less memory, {100 * best.time - 100:+.1f} % time."
    )


def page(source: Origin, size: Size, threads: int, rounds: int, heats: dict[str, list[Row]]) -> str:
    parts = [
        "# Recomputation: memory against time\n",
        f"- {source.date}; {source.machine}; load when it began {source.load:.1f}; {threads} threads",
        f"- `{source.command}`",
        f"- commit {source.commit}",
        "- " + ", ".join(f"{name} {version}" for name, version in source.versions.items()),
        f"- {size.layers} layers of width {size.width}, {size.rows} rows of {size.length} tokens; "
        f"{rounds} rounds, {size.passes} passes each\n",
        ABOUT,
    ]
    for method, found in heats.items():
        parts += [f"\n## {method}\n", verdict(found) + "\n", table(found)]
    return "\n".join(parts) + "\n"


def lines_of(found: Sequence[Row]) -> list[Line]:
    sides = list(dict.fromkeys(row.side for row in found))
    return [
        Line(side, tuple(sorted((row.memory, row.time) for row in found if row.side == side)))
        for side in sides
    ]


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--methods", nargs="+", default=["full", "lora"], choices=["full", "lora"])
    words.add_argument("--layers", type=int, default=24)
    words.add_argument("--width", type=int, default=256)
    words.add_argument("--rows", type=int, default=2)
    words.add_argument("--length", type=int, default=512)
    words.add_argument("--passes", type=int, default=5)
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--threads", type=int, default=2)
    words.add_argument("--torch-budgets", type=float, nargs="*", default=list(BUDGETS))
    words.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    asked = words.parse_args()
    size = Size(asked.layers, asked.width, asked.rows, asked.length, asked.passes)
    source = origin(
        ["python", "-m", "benchmarks.memory.recompute", *sys.argv[1:]], {"torch": torch.__version__}
    )
    heats = {
        method: measure(method, size, asked.threads, asked.rounds, asked.torch_budgets)
        for method in asked.methods
    }
    text = page(source, size, asked.threads, asked.rounds, heats)
    print(text)
    figures = {
        "size": asdict(size),
        "heats": {name: [asdict(row) for row in found] for name, found in heats.items()},
    }
    publish(asked.out, "memory-recompute", source, text, figures)
    for method, found in heats.items():
        drawn = picture(lines_of(found), f"Recomputation, {method}: memory against time", AIM)
        (asked.out / f"{source.date[:10]}-memory-recompute-{method}.svg").write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
