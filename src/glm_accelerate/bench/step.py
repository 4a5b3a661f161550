"""One config's training steps, measured: speed, use of the device, memory, and where a step's time goes."""

import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from glm_accelerate.bench.breakdown import Breakdown, profiled
from glm_accelerate.bench.peak import Peak, peak
from glm_accelerate.bench.run import Ready, Say, ready
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.types import Step
from glm_accelerate.kernels.compiled import compilations
from glm_accelerate.models.shapes import shapes_of
from glm_accelerate.plan.flops import Trained, step_flops
from glm_accelerate.plan.hardware import detect
from glm_accelerate.runtime.device import device_of
from glm_accelerate.training.loop import Run, take


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
    """Where it ran."""

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
    with ready(config, warmup + steps + 1, say) as made:
        run, whole = made.run, warmup + steps + 1
        memory, compiled, taken = 0, 0, list[StepMeasurement]()
        for number in range(warmup + steps):
            say("warming up" if number < warmup else "measuring", number, whole)
            if number == warmup:
                compiled = _compilations()
            device_of(run.device).reset_peak()
            taken.append(take_step(made))
            memory = max(memory, device_of(run.device).peak()) if number >= warmup else memory
        after = _compilations()
        say("profiling", whole - 1, whole)
        spent = profiled(lambda: take_step(made).waited, run.device)
        say("measuring the peak", whole, whole)
        best = peak(run.device, run.plan.compute)
        return _figures(made, taken, warmup, (compiled, after - compiled), memory, spent, best)


def take_step(made: Ready) -> StepMeasurement:
    """The next step of the run, as the loop does it."""
    run = made.run
    began, cpu = time.perf_counter(), time.process_time()
    step = next(run.steps)
    waited = time.perf_counter() - began
    outcome = take(run, step)
    device_of(run.device).synchronize()  # the update itself is still under way
    return StepMeasurement(
        wall=time.perf_counter() - began,
        cpu=time.process_time() - cpu,
        waited=waited,
        samples=len(step.numbers),
        tokens=step.tokens,
        targets=step.targets,
        computed=sum(batch.tokens_RT.size for batch in step.batches),
        flops=_flops(made, step),
        loss=outcome.loss,
    )


def _flops(made: Ready, step: Step) -> float:
    adapt = made.run.config.adapt
    trained = Trained(adapt.method, adapt.layers, adapt.prefix_tokens if adapt.method == "prefix" else 0)
    lengths = made.inputs.train.lengths[list(step.numbers)].tolist()
    return step_flops(made.run.model.sizes, trained, lengths, step.targets)


def _compilations() -> int:
    """Without loading the compiler to ask it: that takes memory."""
    return compilations() if "torch._dynamo" in sys.modules else 0


def _figures(
    made: Ready,
    taken: Sequence[StepMeasurement],
    warmup: int,
    compiled: tuple[int, int],
    memory: int,
    spent: Breakdown,
    best: Peak,
) -> StepFigures:
    run, counted = made.run, taken[warmup:]
    flops = median(one.flops / one.wall for one in counted)
    parameters = list(run.model.parameters())
    return StepFigures(
        machine=machine(run),
        method=run.config.adapt.method,
        compute=run.plan.compute,
        parameters=shapes_of(run.model.sizes).parameters,
        trained=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
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
        memory_above_start=memory - made.memory_before,
        compilations=compiled[0],
        recompilations=compiled[1],
        first_seconds=taken[0].wall,
        breakdown=spent,
        steps=tuple(counted),
    )


def machine(run: Run) -> Machine:
    """What a figure has to be read with."""
    version, python = str(torch.__version__), platform.python_version()
    return Machine(detect().name, run.device.type, torch.get_num_threads(), version, python)
