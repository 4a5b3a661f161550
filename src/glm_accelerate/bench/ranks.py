"""`bench step --nproc N`: steps on N ranks of this machine, beside what the plan foretold of them."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

from glm_accelerate.bench.report import Report, Table, now, percent
from glm_accelerate.bench.run import Say, ready
from glm_accelerate.bench.step import Machine, StepMeasurement, machine, take_step
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.observe.chart import Bar
from glm_accelerate.parallel.place import Axes
from glm_accelerate.parallel.ranks import Ranks, joined
from glm_accelerate.plan.ground import ground_of
from glm_accelerate.plan.hardware import detect
from glm_accelerate.plan.layouts import cluster_of, compare_layouts
from glm_accelerate.plan.probe import measured_ground
from glm_accelerate.plan.resolve import plan_and_weigh
from glm_accelerate.runtime.device import device_of
from glm_accelerate.runtime.words import amount, duration, number


@dataclass(frozen=True, slots=True)
class RankFigures:
    """Medians of one rank, and the most that it needed."""

    step_seconds: float
    cpu_seconds: float  # of its threads, a step
    waited_seconds: float  # for data, a step
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class RanksFigures:
    """All ranks together, and what was foretold; None where nothing is known of the device's speed."""

    machine: Machine
    method: str
    compute: str
    axes: str
    step_seconds: float  # of the slowest rank
    tokens_per_second: float  # of all ranks
    foretold_seconds: float | None
    foretold_tokens_per_second: float | None
    foretold_bytes: int | None  # of the rank that needs most
    ranks: tuple[RankFigures, ...]
    steps: tuple[StepMeasurement, ...]  # of the first rank


def measure_ranks(config: RunConfig, steps: int, warmup: int, say: Say) -> RanksFigures | None:
    """One rank's part: `warmup` steps that don't count, and `steps` that do. None but on the first."""
    with joined() as ranks:
        foretold: float | None = ranks.decide(lambda: _foretold(config, ranks))
        with ready(config, warmup + steps, say if ranks.first else _quiet, ranks) as prepared:
            run, device = prepared.run, device_of(prepared.run.device)
            memory, measured = 0, list[StepMeasurement]()
            for index in range(warmup + steps):
                if ranks.first:
                    say("warming up" if index < warmup else "measuring", index, warmup + steps)
                device.reset_peak()
                measured.append(take_step(prepared))
                memory = max(memory, device.peak())
            counted, plan = measured[warmup:], run.plan
            walls, cpus, waits = (
                [getattr(one, name) for one in counted] for name in ("wall", "cpu", "waited")
            )
            mine = RankFigures(median(walls), median(cpus), median(waits), memory)
            every = tuple(RankFigures(**one) for one in ranks.gather(asdict(mine)))
            if not ranks.first:
                return None
            tokens = median(one.tokens for one in counted)
            return RanksFigures(
                machine=machine(run),
                method=config.adapt.method,
                compute=plan.compute,
                axes=_in_words(Axes.of(plan)),
                step_seconds=max(one.step_seconds for one in every),
                tokens_per_second=median(one.tokens / one.wall for one in counted),
                foretold_seconds=foretold,
                foretold_tokens_per_second=tokens / foretold if foretold else None,
                foretold_bytes=plan.memory.watched(plan.device) if plan.memory is not None else None,
                ranks=every,
                steps=tuple(counted),
            )


def _foretold(config: RunConfig, ranks: Ranks) -> float | None:
    """Seconds of a step, as the plan compares layouts."""
    ground = measured_ground(config, ground_of(config, detect(), ranks.count))
    _, weighed = plan_and_weigh(config, ground)
    cluster = cluster_of(ground, weighed.speed)
    if cluster is None:
        return None
    return compare_layouts(config, weighed, ground.sizes, cluster).own.time.seconds


def ranks_report(figures: RanksFigures, config: str) -> Report:
    """What was measured beside what was foretold, then each rank."""
    machine, seconds, bytes_ = figures.machine, figures.foretold_seconds, figures.foretold_bytes
    most = max(one.memory_bytes for one in figures.ranks)

    a_second, its = figures.tokens_per_second, figures.foretold_tokens_per_second
    rows = (
        _row("a step", figures.step_seconds, seconds, duration),
        _row("tokens a second", a_second, its, number),
        _row("peak memory of a rank", most, bytes_, amount),
    )
    each = tuple(
        (
            f"{rank}",
            duration(one.step_seconds),
            duration(one.cpu_seconds),
            duration(one.waited_seconds),
            amount(one.memory_bytes),
        )
        for rank, one in enumerate(figures.ranks)
    )
    return Report(
        name="step-ranks",
        title=f"Training steps of {config} on {len(figures.ranks)} ranks",
        about=(
            f"{now()}; {machine.device}, {machine.threads} threads a rank",
            f"torch {machine.torch}, Python {machine.python}",
            f"{figures.axes}; {figures.method}, products in {figures.compute}",
            f"medians of {len(figures.steps)} steps after the warm-up",
        ),
        tables=(
            Table("Figures", ("", "measured", "foretold", "of measured"), rows),
            Table("Ranks", ("rank", "a step", "processor time", "waiting for data", "peak memory"), each),
        ),
        picture=tuple(
            Bar(f"rank {rank}", one.step_seconds, duration(one.step_seconds))
            for rank, one in enumerate(figures.ranks)
        ),
        figures={"config": config, "date": now(), **asdict(figures)},
    )


def _row(name: str, measured: float, foretold: float | None, show: Callable[[float], str]) -> tuple[str, ...]:
    if foretold is None:
        return name, show(measured), "", ""
    return name, show(measured), show(foretold), percent(foretold / measured)


def _in_words(axes: Axes) -> str:
    return ", ".join(f"{name} {size}" for name, size in asdict(axes).items() if size != 1) or "one rank"


def _quiet(what: str, done: int, total: int) -> None:
    """The first rank says it."""
