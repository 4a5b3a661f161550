"""Do intervals cover, are four looks safe, and what does deciding on samples save and cost?

python -m benchmarks.evaluation.statistics [--sets 2000] [--runs 200] [--items RUN] [--out benchmarks/results]

Sets whose figure is known (`simulate.py`); with --items, the run's own losses of all samples at each step.
"""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.evaluation.simulate import (
    BEYOND,
    PROMISED,
    Floats,
    Outcome,
    Population,
    covered,
    covered_paired,
    fooled,
    lowest_of,
    ours,
    run_of,
)
from benchmarks.race.report import Origin, origin, publish
from glm_accelerate.evaluate.statistics.intervals import loss_interval, rate_interval
from glm_accelerate.evaluate.statistics.looks import level_of, looks

SIZES = ((128, 1000), (128, 4000), (512, 4000))
NULL = (128, 320, 800, 2000)  # looks, of 4,000
STEPS = 20

Row = TypeVar("Row")

ABOUT = """\
**Coverage**: in what share of sets the 95 % interval of a sample holds the figure of all samples; for the
loss, and for the *difference* of two steps on the same samples. Sets are drawn anew each time, and so is the
order of evaluation. Lengths are lognormal (sigma 1, cut at 2,048), losses too (sigma 0.4 to 0.8), differences
have Student's t with 4 degrees of freedom. Below the empty line: sets beyond what is promised; no interval
knows what a sample has not shown.
"""

ABOUT_RUNS = """\
**samples**: evaluated, of all samples at all steps. **missed**: how often the chosen step's loss on all
samples is more than the margin above the lowest. **behind**: how far above, in thousandths, on average.
**wrong**: verdicts (better, worse, tied) that all samples contradict; **undecided**: verdicts that had to
stay open. *ours*: the step that no later one was found better than, with at most four looks a step.
"""


@dataclass(frozen=True)
class Coverage:
    kind: str
    samples: int
    total: int
    loss: float
    half: float  # width of the interval, on average
    difference: float
    promised: bool


@dataclass(frozen=True)
class Equal:
    """Two steps that are equal over all samples, four looks."""

    kind: str
    better: float
    either: float
    careless: float  # better or worse, if each look is given the whole 5 %


@dataclass(frozen=True)
class Cost:
    """What one way to choose costs, over many runs."""

    run: str
    rule: str
    samples: float
    missed: float
    behind: float
    compared: int
    wrong: float
    undecided: float


# --- Sets. ---


def coverages(sets: int) -> Iterator[Coverage]:
    for kind, make in {**PROMISED, **BEYOND}.items():
        for count, total in SIZES:
            loss, half = covered(make, sets, count, total)
            difference, _ = covered_paired(make, sets, count, total)
            yield Coverage(kind, count, total, loss, half, difference, kind in PROMISED)


def equals(sets: int) -> Iterator[Equal]:
    for kind, make in PROMISED.items():
        better, either = fooled(make, sets, NULL, 4000, level_of(NULL))
        _, careless = fooled(make, sets, NULL, 4000, 0.05)
        yield Equal(kind, better, either, careless)


def share_coverages(sets: int) -> Iterator[tuple[float, int, float]]:
    """(share of right ones, samples, coverage) of exact intervals, of 1,000."""
    draw = np.random.default_rng(0)
    for share in (0.01, 0.3, 0.95):
        for count in (20, 100, 400):
            rights = draw.hypergeometric(round(1000 * share), 1000 - round(1000 * share), count, sets)
            intervals = {int(right): rate_interval(int(right), count, 1000) for right in set(rights.tolist())}
            hits = sum(low <= share <= high for low, high in (intervals[int(right)] for right in rights))
            yield share, count, hits / sets


def exact_at_all(sets: int) -> int:
    """In how many sets the estimate from all samples, in the order of evaluation, is that in file order to
    the last bit, with an interval of no width.
    """
    same = 0
    for seed in range(sets):
        make = list(PROMISED.values())[seed % len(PROMISED)]
        population = make(np.random.default_rng([seed, 3]), 500)
        items, strata = population.drawn(seed)
        plain = math.fsum(population.losses_N) / math.fsum(population.targets_N)
        same += loss_interval(items, strata, 500) == (plain, (plain, plain))
    return same


# --- Runs. ---


def curves(draw: np.random.Generator) -> dict[str, list[float]]:
    """Held-out loss of all samples over a run's steps."""
    steps = np.arange(STEPS)
    return {
        "falls": (1.6 + 0.6 * np.exp(-steps / 5)).tolist(),
        "overfits": (1.6 + 0.6 * np.exp(-steps / 3) + 0.01 * np.maximum(0, steps - 9)).tolist(),
        "nearly flat": (1.6 + draw.normal(0, 0.004, STEPS).cumsum() / 2).tolist(),
    }


def rules(losses_SN: Floats, whole: Population, seed: int, margin: float) -> dict[str, Outcome]:
    """Every way to choose a step, on the same order of evaluation."""
    choice = whole.choice(seed)
    total = len(choice.order)
    losses_SN, targets_N = losses_SN[:, choice.order], whole.targets_N[choice.order]
    some = [count for count in (128, 512) if count < total]
    fixed = {f"lowest on {count}": lowest_of(losses_SN, targets_N, count) for count in some}

    def decided(most: int | None, crown: bool) -> Outcome:
        return ours(losses_SN, targets_N, choice.strata, looks(total, most), margin, crown)

    return {
        "lowest on all": lowest_of(losses_SN, targets_N, total),
        **fixed,
        "ours": decided(None, crown=False),
        "ours, finalists on all": decided(None, crown=True),
        "ours, a quarter at most": decided(total // 4, crown=False),
        "ours, a quarter at most, finalists on all": decided(total // 4, crown=True),
    }


def costs(
    run: str, found: Sequence[tuple[Floats, Population, dict[str, Outcome]]], margin: float
) -> list[Cost]:
    rows: list[Cost] = []
    for rule in found[0][2]:
        behind: list[float] = []
        for losses_SN, whole, outcomes in found:
            full_S = losses_SN.sum(1) / whole.targets_N.sum()
            behind.append(float(full_S[outcomes[rule].chosen] - full_S.min()))
        all_of = [outcomes[rule] for _, _, outcomes in found]
        compared = sum(outcome.compared for outcome in all_of)
        rows.append(
            Cost(
                run=run,
                rule=rule,
                samples=float(np.mean([outcome.cost for outcome in all_of])),
                missed=float(np.mean([one > margin + 1e-9 for one in behind])),
                behind=float(np.mean(behind)),
                compared=compared,
                wrong=sum(outcome.wrong for outcome in all_of) / max(1, compared),
                undecided=sum(outcome.undecided for outcome in all_of) / max(1, compared),
            )
        )
    return rows


def simulated(runs: int, margin: float) -> Iterator[Cost]:
    for kind in curves(np.random.default_rng(0)):
        found: list[tuple[Floats, Population, dict[str, Outcome]]] = []
        for seed in range(runs):
            draw = np.random.default_rng([seed, 4])
            old = PROMISED["long tails"](draw, 4000)
            losses_SN = run_of(draw, old, curves(draw)[kind], 0.03)
            found.append((losses_SN, old, rules(losses_SN, old, seed, margin)))
        yield from costs(kind, found, margin)


def real(run: Path, orders: int, margin: float) -> list[Cost]:
    """A run's own losses, evaluated in `orders` other orders."""
    losses_SN, targets_N = items_of(run)
    whole = Population(losses_SN[0], targets_N, np.zeros(len(targets_N), dtype=np.int64))
    found = [(losses_SN, whole, rules(losses_SN, whole, seed, margin)) for seed in range(orders)]
    name = f"{run.name}, {len(losses_SN)} steps, {len(targets_N):,} samples"
    return costs(name, found, margin)


def items_of(run: Path) -> tuple[Floats, Floats]:
    """Losses of each step that was evaluated on the most samples, and their targets."""
    plans: dict[str, dict[int, tuple[int, Path]]] = {}
    for path in (run / "evals").glob("*.items.json"):
        step, plan, attempt = path.name.removesuffix(".items.json").split("-")
        steps = plans.setdefault(plan, {})
        steps[int(step)] = max(steps.get(int(step), (-1, path)), (int(attempt), path))
    if not plans:
        raise SystemExit(f"no {run}/evals/*.items.json")
    steps = max(plans.values(), key=len)
    said = [json.loads(path.read_text()) for _, (_, path) in sorted(steps.items())]
    most = max(len(one["losses"]) for one in said)
    whole = [one for one in said if len(one["losses"]) == most]
    counts = Counter(len(one["losses"]) for one in said)
    if len(whole) < 3:
        raise SystemExit(f"train with evaluate.samples=all: steps by their number of samples: {dict(counts)}")
    return np.array([one["losses"] for one in whole]), np.array(whole[0]["targets"], dtype=np.float64)


# --- The report. ---


def coverage_table(rows: Sequence[Coverage]) -> list[str]:
    lines = ["| sets | samples | of | loss | half width | difference |", "| --- |" + " ---: |" * 5]
    for promised in (True, False):
        lines += [
            f"| {row.kind} | {row.samples} | {row.total:,} | {row.loss:.1%} | {row.half:.3f} "
            f"| {row.difference:.1%} |"
            for row in rows
            if row.promised is promised
        ]
        lines += ["| | | | | | |"] if promised else []
    return lines


def cost_table(rows: Sequence[Cost]) -> list[str]:
    lines = [
        "| run | rule | samples | missed | behind | wrong | undecided |",
        "| --- | --- |" + " ---: |" * 5,
    ]
    for row in rows:
        verdicts = f"{row.wrong:.2%} | {row.undecided:.1%}" if row.compared else " | "
        lines.append(
            f"| {row.run} | {row.rule} | {row.samples:.1%} | {row.missed:.1%} | {1000 * row.behind:.2f} "
            f"| {verdicts} |"
        )
    return lines


def heading(source: Origin, title: str) -> list[str]:
    return [
        f"# {title}\n",
        f"- {source.date}; {source.machine}",
        f"- `{source.command}`",
        f"- commit {source.commit}",
        "- " + ", ".join(f"{name} {version}" for name, version in source.versions.items()) + "\n",
    ]


def on_sets(source: Origin, given: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    coverage, null = list(heard(coverages(given.sets))), list(heard(equals(given.sets)))
    shares, exact = list(heard(share_coverages(given.sets))), exact_at_all(given.sets)
    rows = list(heard(simulated(given.runs, given.margin)))
    level = f"{level_of(NULL):.2%}"
    lines = [
        *heading(source, "Evaluation on samples: coverage, false alarms, cost"),
        ABOUT,
        f"{given.sets:,} sets a row.\n",
        *coverage_table(coverage),
        "\nExact intervals of shares, of 1,000 samples:\n",
        "| share | samples | coverage |",
        "| ---: | ---: | ---: |",
        *(f"| {share:.0%} | {count} | {found:.1%} |" for share, count, found in shares),
        f"\nAll samples: equal to the plain mean to the last bit in {exact:,} of {given.sets:,} sets.\n",
        "Two steps that are equal over all samples, looked at after "
        f"{', '.join(map(str, NULL))} of 4,000 samples",
        f"at {level} each (the last column: at 5 % each):\n",
        "| sets | called better | better or worse | without correction |",
        "| --- | ---: | ---: | ---: |",
        *(f"| {row.kind} | {row.better:.1%} | {row.either:.1%} | {row.careless:.1%} |" for row in null),
        f"\n{given.runs} runs a kind, {STEPS} evaluations of 4,000 samples, margin {given.margin}:\n",
        *cost_table(rows),
        "\n" + ABOUT_RUNS,
    ]
    figures = {
        "coverage": [asdict(row) for row in coverage],
        "equal": [asdict(row) for row in null],
        "shares": shares,
        "exact": exact,
        "costs": [asdict(row) for row in rows],
    }
    return "\n".join(lines), figures


def on_items(source: Origin, given: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    rows = real(given.items, given.runs, given.margin)
    lines = [
        *heading(source, "Evaluation on samples: a real run, decided again"),
        f"{given.runs} orders of evaluation, margin {given.margin}:\n",
        *cost_table(rows),
        "\n" + ABOUT_RUNS,
    ]
    return "\n".join(lines), {"costs": [asdict(row) for row in rows]}


def heard(rows: Iterator[Row]) -> Iterator[Row]:
    for row in rows:
        print(row, file=sys.stderr, flush=True)
        yield row


def arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Coverage, false alarms and cost of evaluation on samples.")
    parser.add_argument("--sets", type=int, default=2000, help="simulated held-out sets a row")
    parser.add_argument(
        "--runs", type=int, default=200, help="simulated runs a kind, or orders of a real one"
    )
    parser.add_argument("--margin", type=float, default=0.002)
    parser.add_argument("--items", type=Path, metavar="RUN", help="decide this run again (samples: all)")
    parser.add_argument("--out", type=Path, help="directory for the JSON and Markdown; default: only print")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> None:
    given = arguments(words)
    source = origin(["python", "-m", "benchmarks.evaluation.statistics", *words], {"numpy": np.__version__})
    text, figures = (on_items if given.items else on_sets)(source, given)
    print(text)
    if given.out is not None:
        publish(given.out, f"evaluation-statistics{'-run' if given.items else ''}", source, text, figures)


if __name__ == "__main__":
    main(sys.argv[1:])
