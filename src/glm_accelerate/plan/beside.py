"""Where evaluations run: on a device that training leaves free, on spare cores, or between two steps.

A spare device has to hold the model alone. A process on spare cores pays only if it keeps up: an evaluation
on them has to take no longer than what training does meanwhile.
"""

from dataclasses import dataclass

import torch

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.inputs import Inputs
from glm_accelerate.models.adapt import kept_bytes, kind_of
from glm_accelerate.models.shapes import shapes_of
from glm_accelerate.models.sizes import Sizes
from glm_accelerate.plan.cost import CORE_PLAIN, core_speed, speed_of
from glm_accelerate.plan.fit import SettledChoices
from glm_accelerate.plan.ground import Load
from glm_accelerate.plan.hardware import Hardware
from glm_accelerate.runtime.words import amount

PASSES = 3  # a training step is about so many forward passes
SHORT = 60.0  # seconds of training
SLOWEST_DEVICE = 3e13  # products a second, of one that no data sheet is known of
FIRST_LOOK = 128  # samples after which `evaluate.looks` asks for the first time whether they are enough
ROUND_MODEL = 1.2  # assumed: weights and what is copied of them
PASS_BYTES = 3e9  # assumed: a context, one pass, and a cache of answers


@dataclass(frozen=True, slots=True)
class Between:
    """What training does between two evaluations, and what an evaluation does: tokens through the model."""

    times: float  # evaluations
    trained: float
    usual: float  # evaluated: the first look
    most: float  # ... where none of the looks before the last tells two steps apart
    largest: float  # all samples, as finalists are given in the end
    parameters: float
    compute: str
    model_bytes: float  # as an evaluator keeps it


@dataclass(frozen=True, slots=True)
class EvaluatorPlace:
    """Where evaluations run."""

    where: str  # beside, inline or external
    device: str
    threads: int  # of an evaluator on a CPU, at the most
    why: str
    seconds: float = 0.0  # that the largest takes there, unless it is inline
    bytes: float = 0.0  # that it needs of a spare device


def between(
    config: RunConfig, sizes: Sizes, inputs: Inputs, load: Load, settled: SettledChoices, every: int
) -> Between:
    dev, section, kind = inputs.dev, config.evaluate, kind_of(config.adapt)
    assert dev is not None
    total, each = len(dev), float(dev.lengths.mean())
    answer = section.max_new_tokens if any(name != "loss" for name in section.metrics) else 0
    most = total if isinstance(section.samples, str) else min(total, section.samples)
    first = FIRST_LOOK if section.samples == "auto" and total >= 2 * FIRST_LOOK else most
    kept: torch.dtype = getattr(torch, config.model.dtype if kind else settled.dtype)
    return Between(
        times=load.steps / every,
        trained=every * load.work().tokens / load.steps,
        usual=first * (each + answer),
        most=most * each + first * answer,  # a close race takes more samples, and no more answers
        largest=total * (each + answer),
        parameters=shapes_of(sizes).parameters,
        compute=settled.compute,
        model_bytes=kept_bytes(sizes, kept, kind),
    )


def place_of(config: RunConfig, hardware: Hardware, ranks: int, work: Between) -> EvaluatorPlace:
    """What the config says, or the first that holds: a spare device, spare cores that keep up, inline."""
    asked = config.evaluate.where
    if asked == "inline":
        return EvaluatorPlace("inline", "", 0, "the config: training waits")
    if asked == "external":  # wherever that is: on something like this
        why = "the config: `evaluate RUN --follow` does it"
        seconds = _seconds(hardware, hardware.device, 1, work, work.largest)
        return EvaluatorPlace("external", "", 0, why, seconds)
    if asked == "auto" and config.parallel.size("context") > 1:
        return EvaluatorPlace("inline", "", 0, "ranks share long documents, an evaluator would be alone")
    on_cpu = hardware.device == "cpu"
    busy = ranks * (hardware.threads or hardware.cores) if on_cpu else ranks
    spare = max(0, hardware.cores - busy)
    needed = ROUND_MODEL * work.model_bytes + PASS_BYTES
    device, but = "cpu", ""
    if not on_cpu and hardware.count > ranks:  # a model that is divided in training is whole here
        device, has = f"{hardware.device}:{ranks}", hardware.memory_bytes
        if needed > has:
            but = f"an undivided model needs about {amount(needed)} of its {amount(has)}; "
            device, but = "cpu", f"{device} is spare, but {but}"
    # On cores the first evaluation has one of them: it is given more when it does not keep up.
    seconds = _seconds(hardware, device, 1, work, work.largest)
    if asked == "beside":
        held = 0.0 if device == "cpu" else needed
        return EvaluatorPlace("beside", device, max(1, spare), f"{but}the config", seconds, held)
    if device != "cpu":
        return EvaluatorPlace("beside", device, 1, f"{device} is spare", seconds, needed)
    inline, why = _against_cores(config, hardware, busy, spare, work)
    if inline:
        return EvaluatorPlace("inline", "", 0, f"{but}{why}")
    return EvaluatorPlace("beside", "cpu", spare, f"{but}{why}", seconds)


def _against_cores(
    config: RunConfig, hardware: Hardware, busy: int, spare: int, work: Between
) -> tuple[bool, str]:
    """Whether spare cores do not do, and why. `busy`: cores or devices that training takes."""
    if not spare:
        return True, f"training takes all {hardware.cores} cores: it waits"
    free = hardware.free_bytes if hardware.device == "cpu" else hardware.host_bytes
    if free < 2 * work.model_bytes:
        return True, f"no memory for a second model of {amount(work.model_bytes)}"
    given = _seconds(hardware, hardware.device, busy, work, PASSES * work.trained)
    if given * work.times < SHORT:
        return True, "the run is short: starting an evaluator would take longer"
    usual, most = (
        _seconds(hardware, "cpu", spare, work, tokens) / given for tokens in (work.usual, work.most)
    )
    cores = f"{spare} spare core{'s' if spare > 1 else ''}"
    none_left_out = config.evaluate.keep == "all" or config.evaluate.decides
    if (taken := most if none_left_out else usual) > 1:
        return True, f"{cores} would take {taken:.1f} times as long as training meanwhile"
    close = f", {most:.0%} in a close race" if most > usual else ""
    return False, f"{cores}, busy about {usual:.0%} of the time{close}"


def _seconds(hardware: Hardware, device: str, count: int, work: Between, tokens: float) -> float:
    """The time of so many tokens through the model, on so many cores or devices, by what is known."""
    if device == "cpu":
        speed = core_speed(hardware, work.compute) if hardware.device == "cpu" else CORE_PLAIN
    else:
        known = speed_of(hardware, work.compute)
        speed = known.products if known is not None else SLOWEST_DEVICE
    return 2 * work.parameters * tokens / (count * speed)
