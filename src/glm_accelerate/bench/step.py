"""`bench step`: speed, use of the device, memory, and where a step's time goes."""

import platform
import sys
import time
from dataclasses import asdict, dataclass
from statistics import median

import torch

from glm_accelerate.bench.breakdown import Breakdown, profiled
from glm_accelerate.bench.peak import Peak, peak
from glm_accelerate.bench.report import Report, Table, now, percent
from glm_accelerate.bench.run import Ready, Say, ready
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.kernels.compiled import compilations
from glm_accelerate.models.shapes import shapes_of
from glm_accelerate.observe.chart import Bar
from glm_accelerate.plan.cost import Trained, step_flops
from glm_accelerate.plan.hardware import detect
from glm_accelerate.runtime.device import device_of
from glm_accelerate.runtime.words import amount, duration, number
from glm_accelerate.training.loop import Run, take

LISTED = 15  # operators by name; the others are one line


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """What one step took and what it learnt from."""

    wall: float  # seconds, the wait for its batches included
    cpu: float
    waited: float  # of `wall`, until its batches were there
    samples: int
    tokens: int  # unpadded
    targets: int
    computed: int  # positions, padding included
    flops: float
    loss: float


@dataclass(frozen=True, slots=True)
class Machine:
    """What a figure has to be read with."""

    device: str
    kind: str
    threads: int
    torch: str
    python: str


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Medians over the measured steps, and all of them."""

    machine: Machine
    method: str
    compute: str
    parameters: int
    trained: int
    tokens_per_second: float
    samples_per_second: float
    step_seconds: float
    cpu_seconds: float  # of all threads, a step
    waited_seconds: float  # for data, a step
    padding: float  # share of the computed positions that hold no token
    flops_per_second: float
    utilisation: float  # of the measured peak
    utilisation_of_data_sheet: float | None
    peak: Peak
    memory_bytes: int  # at most in use in a step
    memory_above_start: int  # ... beyond what was in use before the model was loaded
    compilations: int  # in the warm-up
    recompilations: int  # after it
    first_seconds: float  # of the first step, in which it compiles
    breakdown: Breakdown
    steps: tuple[StepMeasurement, ...]


def measure(config: RunConfig, steps: int, warmup: int, say: Say) -> StepFigures:
    """`warmup` steps that don't count, `steps` that do, and one under the profiler."""
    whole = warmup + steps + 1
    with ready(config, whole, say) as prepared:
        run, device = prepared.run, device_of(prepared.run.device)
        memory, compiled, measured = 0, 0, list[StepMeasurement]()
        for index in range(warmup + steps):
            say("warming up" if index < warmup else "measuring", index, whole)
            if index == warmup:
                compiled = _compilations()
            device.reset_peak()
            measured.append(take_step(prepared))
            memory = max(memory, device.peak()) if index >= warmup else memory
        recompiled = _compilations() - compiled
        say("profiling", whole - 1, whole)
        breakdown = profiled(lambda: take_step(prepared).waited, run.device)
        say("measuring the peak", whole, whole)
        best = peak(run.device, run.plan.compute)
        counted = measured[warmup:]
        flops = median(one.flops / one.wall for one in counted)
        return StepFigures(
            machine=machine(run),
            method=run.config.adapt.method,
            compute=run.plan.compute,
            parameters=shapes_of(run.model.sizes).parameters,
            trained=sum(each.numel() for each in run.model.parameters() if each.requires_grad),
            tokens_per_second=median(one.tokens / one.wall for one in counted),
            samples_per_second=median(one.samples / one.wall for one in counted),
            step_seconds=median(one.wall for one in counted),
            cpu_seconds=median(one.cpu for one in counted),
            waited_seconds=median(one.waited for one in counted),
            padding=1 - sum(one.tokens for one in counted) / sum(one.computed for one in counted),
            flops_per_second=flops,
            utilisation=flops / best.measured,
            utilisation_of_data_sheet=flops / best.data_sheet if best.data_sheet else None,
            peak=best,
            memory_bytes=memory,
            memory_above_start=memory - prepared.memory_before,
            compilations=compiled,
            recompilations=recompiled,
            first_seconds=measured[0].wall,
            breakdown=breakdown,
            steps=tuple(counted),
        )


def take_step(prepared: Ready) -> StepMeasurement:
    """The run's next step, done as in the training loop."""
    run, adapt = prepared.run, prepared.run.config.adapt
    began, cpu = time.perf_counter(), time.process_time()
    step = next(run.steps)
    waited = time.perf_counter() - began
    outcome = take(run, step)
    device_of(run.device).synchronize()  # the update itself is still under way
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    trained = Trained(adapt.method, adapt.layers, adapt.prefix_tokens if adapt.method == "prefix" else 0)
    lengths = prepared.inputs.train.lengths[list(step.numbers)].tolist()
    return StepMeasurement(
        wall=wall,
        cpu=cpu,
        waited=waited,
        samples=len(step.numbers),
        tokens=step.tokens,
        targets=step.targets,
        computed=sum(batch.tokens_RT.size for batch in step.batches),
        flops=step_flops(run.model.sizes, trained, lengths, step.targets),
        loss=outcome.loss,
    )


def _compilations() -> int:
    """Without loading the compiler to ask it: that takes memory."""
    return compilations() if "torch._dynamo" in sys.modules else 0


def machine(run: Run) -> Machine:
    """The machine on which a run trains."""
    version, python = str(torch.__version__), platform.python_version()
    return Machine(detect().name, run.device.type, torch.get_num_threads(), version, python)


def step_report(figures: StepFigures, config: str) -> Report:
    """Speed, memory, and where the time of a step goes."""
    machine, breakdown, sheet = figures.machine, figures.breakdown, figures.utilisation_of_data_sheet
    rows = [
        ("tokens a second", number(figures.tokens_per_second)),
        ("samples a second", number(figures.samples_per_second)),
        ("a step", duration(figures.step_seconds)),
        ("processor time a step", duration(figures.cpu_seconds)),
        ("waiting for data a step", duration(figures.waited_seconds)),
        ("first step", duration(figures.first_seconds)),
        ("padding", percent(figures.padding)),
        ("model FLOP/s", number(figures.flops_per_second / 1e12, "T")),
        (f"measured peak, {figures.peak.dtype} products", number(figures.peak.measured / 1e12, "T")),
        ("FLOP utilisation, of the measured peak", percent(figures.utilisation)),
        *([("FLOP utilisation, of the data sheet", percent(sheet))] if sheet is not None else []),
        ("peak memory", amount(figures.memory_bytes)),
        ("peak memory above the start", amount(figures.memory_above_start)),
        ("compiled in the warm-up", f"{figures.compilations}"),
        ("compiled again after it", f"{figures.recompilations}"),
    ]
    if breakdown.synchronisations is not None:
        rows.append(("waits for the device in a step", f"{breakdown.synchronisations}"))
    timed = "kernels of the GPU" if breakdown.kernels else "operators on the CPU"
    model = f"{figures.parameters / 1e6:,.4g} M parameters, {figures.trained / 1e6:,.3g} M trained"
    classes = [(kind, taken, percent(taken / breakdown.seconds)) for kind, taken in breakdown.classes.items()]
    return Report(
        name="step",
        title=f"Training steps of {config}",
        about=(
            f"{now()}; {machine.device}, {machine.threads} threads",
            f"torch {machine.torch}, Python {machine.python}",
            f"{model} ({figures.method}), products in {figures.compute}",
            f"medians of {len(figures.steps)} steps after the warm-up; the breakdown is of one more step, "
            f"which took {duration(breakdown.seconds)} under the profiler, by the time of {timed}",
        ),
        tables=(
            Table("Figures", ("", "median"), tuple(rows)),
            Table(
                "One step",
                ("what", "time", "share"),
                tuple((kind, duration(taken), share) for kind, taken, share in classes if taken),
            ),
            Table("Operators", ("operator", "class", "calls", "time", "share"), tuple(_operators(breakdown))),
        ),
        picture=tuple(Bar(*each) for each in classes),
        figures={"config": config, "date": now(), **asdict(figures)},
    )


def _operators(breakdown: Breakdown) -> list[tuple[str, ...]]:
    def row(name: str, kind: str, calls: int, seconds: float) -> tuple[str, ...]:
        return name, kind, f"{calls:,}", duration(seconds), percent(seconds / breakdown.seconds)

    listed, others = breakdown.operators[:LISTED], breakdown.operators[LISTED:]
    rows = [
        row(one.name if len(one.name) <= 80 else f"{one.name[:77]}...", one.kind, one.calls, one.seconds)
        for one in listed
    ]
    if others:
        calls, seconds = sum(one.calls for one in others), sum(one.seconds for one in others)
        rows.append(row(f"{len(others)} others", "", calls, seconds))
    return rows
