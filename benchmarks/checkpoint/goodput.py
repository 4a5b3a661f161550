"""How much of a job's time is training: the adaptive policy against fixed intervals, failures at random.

python -m benchmarks.checkpoint.goodput [--seeds 2000] [--out DIR]

Failures are a Poisson process; one loses the work since the last *published* checkpoint, and a restart. A
policy's interval is the package's own function, asked at each start and then held until the next failure.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.report import Origin, origin, page, publish, table
from glm_accelerate.checkpoint.policy import Measured, interval
from glm_accelerate.config.schema import CheckpointSection

FIXED = tuple(float(round(30 * 2 ** (power / 2))) for power in range(18))  # 30 s to 3 h
BETWEEN = (900.0, 3600.0, 6 * 3600.0, 86_400.0, 7 * 86_400.0)  # seconds between failures
COSTS = ((0.1, 20.0), (1.0, 60.0), (10.0, 120.0), (60.0, 60.0))  # a save blocks, is published; last: in place
WORK = 48 * 3600.0
RESTART = 60.0
MOST_FAILURES = 1000  # of a seed: a job that gets nowhere is not simulated for ever

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Choose = Callable[[int, Floats], Floats]  # of each seed: failures and wall time so far -> interval


@dataclass(frozen=True)
class Point:
    """One place of the grid. Goodput: productive / wall time, means over the seeds."""

    between: float
    blocked: float
    write: float
    learnt: float  # adaptive, from the failures that it meets
    declared: float  # adaptive, told the truth
    fixed: tuple[float, ...]  # of FIXED

    @property
    def best(self) -> int:
        """The fixed interval that one should have taken."""
        return int(np.argmax(self.fixed))


def goodput(
    choose: Choose, between: float, blocked: float, write: float, seeds: int, work: float = WORK
) -> float:
    """All seeds at once, a failure at a time."""
    draw = np.random.default_rng(0)  # every policy meets the same failures
    done, wall = np.zeros(seeds), np.zeros(seeds)
    left = np.arange(seeds)
    failures = 0
    while len(left) and failures < MOST_FAILURES:
        wanted = choose(failures, wall[left])
        wanted = wanted * np.ceil(write / wanted)  # one at a time: those that fall due meanwhile are left out
        rest = work - done[left]
        needed = rest + blocked * (np.ceil(rest / wanted) - 1)
        lived = draw.exponential(between, seeds)[left]
        ends = needed <= lived
        kept = published(wanted, blocked, write, lived)
        done[left] += np.where(ends, rest, np.minimum(kept, rest))
        wall[left] += np.where(ends, needed, lived + RESTART)
        left = left[~ends]
        failures += 1
    return float(np.mean(done / wall))


def published(wanted: Floats, blocked: float, write: float, lived: Floats) -> Floats:
    """Seconds of work that are safe when training is cut off after it `lived` so long."""
    # The n-th save begins after n intervals and n - 1 saves.
    saves = np.floor(np.maximum(0, lived - write + blocked) / (wanted + blocked))
    return saves * wanted


def simulate(
    seeds: int,
    betweens: Sequence[float] = BETWEEN,
    costs: Sequence[tuple[float, float]] = COSTS,
    work: float = WORK,
) -> list[Point]:
    """The whole grid."""
    points: list[Point] = []
    for between in betweens:
        for blocked, write in costs:

            def run(choose: Choose, at: tuple[float, float, float] = (between, blocked, write)) -> float:
                return goodput(choose, *at, seeds, work)

            def adaptive(section: CheckpointSection, cost: tuple[float, float] = (blocked, write)) -> Choose:
                def ask(failures: int, wall: Floats) -> Floats:
                    states = [
                        Measured(0, 0.0, 1.0, 0, *cost, failures=failures, wall_seconds=w)
                        for w in wall.tolist()
                    ]
                    return np.array([interval(section, measured) for measured in states])

                return ask

            fixed = tuple(
                run(lambda _, wall, seconds=seconds: np.full_like(wall, seconds)) for seconds in FIXED
            )
            learnt, declared = (
                run(adaptive(CheckpointSection())),
                run(adaptive(CheckpointSection(between_failures=between))),
            )
            points.append(Point(between, blocked, write, learnt, declared, fixed))
    return points


def summary(points: Sequence[Point]) -> dict[str, tuple[float, float]]:
    """Over the grid: mean goodput, and the most that is missing to the best fixed interval of a point."""

    def of(values: Sequence[float]) -> tuple[float, float]:
        missing = [max(p.fixed) - value for p, value in zip(points, values, strict=True)]
        return float(np.mean(values)), max(missing)

    rows = {"learnt": of([p.learnt for p in points]), "declared": of([p.declared for p in points])}
    for number, seconds in enumerate(FIXED):
        rows[f"{seconds:.0f} s"] = of([p.fixed[number] for p in points])
    return rows


def markdown(source: Origin, seeds: int, points: Sequence[Point]) -> str:
    """Two tables: the grid, and each policy over the whole of it."""
    half_hour = min(range(len(FIXED)), key=lambda number: abs(FIXED[number] - 1800))
    columns = "failure every, save blocks, published after, adaptive, told the rate, best fixed, its interval"

    def cells(p: Point) -> Sequence[str]:
        shares = (f"{each:.2%}" for each in (p.learnt, p.declared, max(p.fixed)))
        costs = f"{p.between / 3600:g} h", f"{p.blocked:g} s", f"{p.write:g} s"
        return *costs, *shares, f"{FIXED[p.best]:.0f} s", f"{p.fixed[half_hour]:.2%}"

    whole = ((name, f"{mean:.2%}", f"{worst:.2%}") for name, (mean, worst) in summary(points).items())
    setting = (
        f"{seeds:,} seeds a point, {WORK / 3600:.0f} h of work, {RESTART:.0f} s a restart; failures are "
        "exponential and none meets a restart"
    )
    return page(
        "Goodput of saving policies, simulated",
        source,
        [setting],
        table((*columns.split(", "), "fixed 30 min"), map(cells, points), left=()),
        "",
        table(("over the whole grid", "mean goodput", "at worst behind the best fixed"), whole),
    )


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Simulate saving policies under random failures.")
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="directory for the JSON and Markdown; default: only print")
    given = parser.parse_args(words)
    source = origin(["python", "-m", "benchmarks.checkpoint.goodput", *words], {"numpy": np.__version__})
    points = simulate(given.seeds)
    figures = {"fixed": FIXED, "points": [asdict(p) for p in points]}
    publish(given.out, "checkpoint-goodput", source, markdown(source, given.seeds, points), figures)


if __name__ == "__main__":
    main(sys.argv[1:])
