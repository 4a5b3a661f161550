"""One point of the simulated goodput on a real run: killed at random times, saved by several rules.

python -m benchmarks.checkpoint.goodput_real [--between 30] [--wall 75] [--schedules 3] [--out DIR]
The command line trains in one process, is killed at exponential times of the wall clock and started again.
All rules meet the same schedules, in turn; the simulation gets the same ones and the measured costs.
"""

import argparse
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median, stdev

import numpy as np
import torch

from benchmarks.checkpoint.goodput import published as safe
from benchmarks.checkpoint.killloop import write_config, written
from benchmarks.race.report import Origin, origin, publish
from glm_accelerate.checkpoint.find import published
from glm_accelerate.checkpoint.format import step_of
from glm_accelerate.checkpoint.policy import Adaptive, Measured, interval
from glm_accelerate.observe.events import BEGINNINGS

SHORT, LONG = 1, 150  # steps
SETTINGS = [
    "train.steps=1000000",
    "precision.compile=off",
    "checkpoint.wait=true",
    "evaluate.every=1000000",
    "evaluate.metrics=[loss]",
    "adapt.method=lora",
    "adapt.dropout=0.1",
]
EXPECTED = 4000  # schedules for what the simulation expects on average

ABOUT = """\
The demo's tiny GLM-4 (LoRA, packed), one process and one thread, saved in place (`checkpoint.wait=true`: the
copy of so small a state costs nothing, so that the cost of a save could not be seen otherwise). Killed at
exponential times of the wall clock, restarts included, started again at once, cut off at the end.

- **goodput**: seconds of the steps that stand at the end, without their saves, / wall seconds: the mean,
  and of each schedule. All rules meet the same.
- **simulated**: the same schedules through the simulation's formula (`goodput.py`), a life being shorter by
  one restart, with what that very run measured: step, save and restart (medians). **expected**: the mean
  and the standard deviation over many schedules, at the medians of all runs of the rule, shown beside it.
- Not simulated: steps and restarts slower than the median (others use the machine too), and a save soon after
  each start, until one is measured. With few saves a run, chance decides what a failure costs.
- `auto`: `checkpoint.every=auto`, told the mean time between failures. Without that, a guess of a day counts
  as a tenth of a failure, which so short a run cannot outweigh.
"""


@dataclass(frozen=True)
class Rule:
    """When to save: as the command line is told, and as the simulation is."""

    name: str
    settings: tuple[str, ...]
    seconds: Callable[[float, float, int, float], float]  # of a step, a save; failures, trained so far


@dataclass(frozen=True)
class Cost:
    """Seconds, medians."""

    step: float
    save: float
    restart: float


@dataclass(frozen=True)
class Run:
    """One rule through one schedule."""

    goodput: float
    stands: int  # the step that stands at the end
    steps: list[float]  # seconds of each, by whichever life, without its save
    saves: list[float]
    restarts: list[float]


@dataclass(frozen=True)
class Row:
    """One rule through all schedules."""

    rule: str
    runs: list[Run]
    cost: Cost
    simulated: list[float]
    expected: float
    deviation: float  # of the simulation from schedule to schedule


def rules(between: float) -> list[Rule]:
    def adaptive(policy: Adaptive) -> Callable[[float, float, int, float], float]:
        def seconds(step: float, save: float, failures: int, trained: float) -> float:
            said = Measured(0, 0.0, step, 0, save, save, failures=failures, wall_seconds=trained)
            return interval(policy, said).seconds

        return seconds

    told = f"checkpoint.between_failures={between}"
    return [
        Rule("auto", ("checkpoint.every=auto", told), adaptive(Adaptive(between))),
        *(
            Rule(
                f"every {steps} step{'s'[: steps - 1]}",
                (f"checkpoint.every={steps}",),
                lambda step, _save, _failures, _trained, steps=steps: steps * step,
            )
            for steps in (SHORT, LONG)
        ),
    ]


def schedule(between: float, wall: float, seed: int) -> list[float]:
    """How long each life lasts. The last one is cut off at the end of the wall time."""
    draw, lives = np.random.default_rng(seed), list[float]()
    while (left := wall - sum(lives)) > 0:
        lives.append(min(left, float(draw.exponential(between))))
    return lives


def simulate(rule: Rule, cost: Cost, lives: Sequence[float]) -> float:
    """Goodput. What the last life did stands, saved or not."""
    done = trained = 0.0
    for number, life in enumerate(lives):
        lived = max(0.0, life - cost.restart)
        wanted = rule.seconds(cost.step, cost.save, number, trained)
        wanted = max(1, round(wanted / cost.step)) * cost.step
        kept = float(safe(np.array([wanted]), cost.save, cost.save, np.array([lived]))[0])
        done += kept if number < len(lives) - 1 else lived - kept / wanted * cost.save
        trained += lived
    return done / sum(lives)


def run(rule: Rule, config: Path, directory: Path, lives: Sequence[float]) -> Run:
    """Really."""
    begun: list[float] = []
    first = time.time()
    for end in itertools.accumulate(lives):
        begun.append(time.time())
        with start(config, directory, rule.settings) as process:
            time.sleep(max(0.0, first + end - time.time()))
            assert process.poll() is None, "it has to live until it is killed"
            process.send_signal(signal.SIGKILL)
    return judge(directory, begun, time.time() - first)


def start(config: Path, directory: Path, settings: Sequence[str]) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "glm_accelerate.cli.main", "train", str(config), *SETTINGS, *settings]
    return subprocess.Popen(
        [*words, "--run", str(directory)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def judge(directory: Path, begun: Sequence[float], wall: float) -> Run:
    """What stands at the end, and what everything cost."""
    took: dict[int, float] = {}  # by step, of the life that did it last
    steps, saves, restarts = list[float](), list[float](), list[float]()
    newest, ended, when = 0, 0.0, 0.0
    for event in written(directory) if (directory / "events.jsonl").is_file() else []:
        when = float(str(event["time"]))
        if event["kind"] in BEGINNINGS:
            newest, ended = int(str(event["step"])), 0.0
        elif event["kind"] == "step":
            newest = int(str(event["step"]))
            seconds = when - ended if ended else float(str(event["seconds"]))
            if not ended:
                restarts.append(when - seconds - max(one for one in begun if one < when))
            steps.append(seconds)
            took[newest], ended = seconds, when
        elif event["kind"] == "checkpoint":  # told after the step that follows the save
            saves.append(float(str(event["blocked_seconds"])))
            took[newest] -= saves[-1]
            steps[-1] -= saves[-1]
    if when < begun[-1] or newest == 0:  # the last life did not begin: what is published stands
        newest = max((step_of(path.name) or 0 for path in published(directory)), default=0)
    done = sum(seconds for step, seconds in took.items() if step <= newest)
    return Run(done / wall, newest, steps, saves, restarts)


def costs(runs: Sequence[Run]) -> Cost:
    steps, saves, restarts = list[float](), list[float](), list[float]()
    for one in runs:
        steps, saves, restarts = steps + one.steps, saves + one.saves, restarts + one.restarts
    return Cost(median(steps), median(saves or [0.0]), median(restarts))


def measure(between: float, wall: float, schedules: int, work: Path) -> list[Row]:
    """All rules in turn through one schedule after the other."""
    config = write_config(work / "demo")
    with start(config, work / "first", ["train.steps=1"]) as process:  # prepares the data
        assert process.wait() == 0
    lives = [schedule(between, wall, seed) for seed in range(schedules)]
    many = [schedule(between, wall, seed) for seed in range(EXPECTED)]
    runs: dict[str, list[Run]] = {rule.name: [] for rule in rules(between)}
    for number, one in enumerate(lives):
        for rule in rules(between):
            runs[rule.name].append(run(rule, config, work / f"{rule.name} {number}", one))
            print(f"{rule.name}, schedule {number}: {runs[rule.name][-1].goodput:.1%}", flush=True)
    return [judged(rule, runs[rule.name], lives, many) for rule in rules(between)]


def judged(rule: Rule, runs: list[Run], lives: Sequence[list[float]], many: Sequence[list[float]]) -> Row:
    """Beside what the simulation says of the same schedules, each at its own run's costs, and of many."""
    simulated = [
        simulate(rule, costs([one] if one.steps else runs), life)
        for one, life in zip(runs, lives, strict=True)
    ]
    cost = costs(runs)
    expected = [simulate(rule, cost, one) for one in many]
    return Row(rule.name, runs, cost, simulated, mean(expected), stdev(expected))


def markdown(source: Origin, between: float, wall: float, lives: Sequence[int], rows: Sequence[Row]) -> str:
    def shares(values: Sequence[float]) -> str:
        return f"**{mean(values):.1%}** ({', '.join(f'{value:.1%}' for value in values)})"

    failures = ", ".join(str(count - 1) for count in lives)
    lines = [
        "# Goodput of saving policies, for real\n",
        f"- {source.date}; {source.machine}; load when it began {source.load:.1f}",
        f"- `{source.command}`",
        f"- commit {source.commit}",
        "- " + ", ".join(f"{name} {version}" for name, version in source.versions.items()),
        f"- a failure every {between:g} s; {len(lives)} schedules of {wall:g} s with {failures} failures "
        f"({len(lives) * wall / between:g} expected in all)",
        "",
        ABOUT,
        "| rule | goodput | simulated | expected | step | save | restart | saves a run | steps at the end |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | --- | --- |",
    ]
    for row in rows:
        cost = f"{row.cost.step * 1e3:.0f} ms | {row.cost.save * 1e3:.0f} ms | {row.cost.restart:.1f} s"
        saves = ", ".join(str(len(one.saves)) for one in row.runs)
        steps = ", ".join(str(one.stands) for one in row.runs)
        real = shares([one.goodput for one in row.runs])
        expected = f"{row.expected:.1%} ± {row.deviation:.1%}"
        lines.append(
            f"| {row.rule} | {real} | {shares(row.simulated)} | {expected} | {cost} | {saves} | {steps} |"
        )
    return "\n".join(lines) + "\n"


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Kill a real run at random; how much of its time stands?")
    parser.add_argument("--between", type=float, default=30.0, help="seconds between failures")
    parser.add_argument("--wall", type=float, default=75.0, help="seconds of a run")
    parser.add_argument("--schedules", type=int, default=3)
    parser.add_argument("--out", type=Path, help="directory for the JSON and Markdown; default: only print")
    given = parser.parse_args(words)
    command = ["python", "-m", "benchmarks.checkpoint.goodput_real", *words]
    source = origin(command, {"torch": torch.__version__})
    with tempfile.TemporaryDirectory(prefix="goodput-") as work:
        rows = measure(given.between, given.wall, given.schedules, Path(work))
    lives = [len(schedule(given.between, given.wall, seed)) for seed in range(given.schedules)]
    text = markdown(source, given.between, given.wall, lives, rows)
    print(text)
    if given.out is not None:
        figures = {"rows": [asdict(row) for row in rows]}
        publish(given.out, "checkpoint-goodput-real", source, text, figures)


if __name__ == "__main__":
    main(sys.argv[1:])
