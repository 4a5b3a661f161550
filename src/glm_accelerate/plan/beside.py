"""Where evaluations run: on a device that training leaves free, on spare cores, or between two steps.

A process on spare cores pays only if it keeps up: an evaluation on them has to take no longer than what
training does meanwhile.
"""

from dataclasses import dataclass

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.plan.cost import CORE_PLAIN, CORE_PRODUCTS, speed_of
from glm_accelerate.plan.hardware import Hardware

PASSES = 3  # a training step is about so many forward passes
SHORT = 60.0  # seconds of training
SLOWEST_DEVICE = 3e13  # products a second, of one that no data sheet is known of


@dataclass(frozen=True, slots=True)
class Between:
    """What training does between two evaluations, and what an evaluation does."""

    times: float  # evaluations
    trained: float  # tokens through the model
    judged: float
    parameters: float
    compute: str
    model_bytes: float


@dataclass(frozen=True, slots=True)
class Place:
    """Where evaluations run."""

    where: str  # beside, inline or external
    device: str
    threads: int  # of an evaluator on a CPU, at the most
    why: str


def place_of(config: RunConfig, hardware: Hardware, ranks: int, between: Between) -> Place:
    """What the config says, or the first that holds: a spare device, spare cores that keep up, inline."""
    asked = config.evaluate.where
    on_cpu = hardware.device == "cpu"
    busy = ranks * (hardware.threads or hardware.cores) if on_cpu else ranks
    spare = max(0, hardware.cores - busy)
    device = "cpu" if on_cpu or hardware.count <= ranks else f"{hardware.device}:{ranks}"
    if asked == "external":
        return Place("external", "", 0, "the config: `evaluate RUN --follow` does it")
    if asked == "inline":
        return Place("inline", "", 0, "the config: training waits")
    if asked == "beside":
        return Place("beside", device, max(1, spare), "the config")
    if device != "cpu":
        return Place("beside", device, 1, f"{device} is spare")
    if not spare:
        return Place("inline", "", 0, f"training takes all {hardware.cores} cores: it waits")
    free = hardware.free_bytes if on_cpu else hardware.host_bytes
    if free < 2 * between.model_bytes:
        return Place("inline", "", 0, f"no memory for a second model of {between.model_bytes / 1e9:.1f} GB")
    taken, given = _seconds(hardware, ranks, between, spare)
    cores = f"{spare} spare core{'s' if spare > 1 else ''}"
    if given * between.times < SHORT:
        return Place("inline", "", 0, "the run is short: starting an evaluator would take longer")
    if taken > given:
        return Place(
            "inline", "", 0, f"{cores} would take {taken / given:.1f} times as long as training meanwhile"
        )
    return Place("beside", "cpu", spare, f"{cores}, busy about {taken / given:.0%} of the time")


def _seconds(hardware: Hardware, ranks: int, between: Between, spare: int) -> tuple[float, float]:
    """Of an evaluation on the spare cores, and of training between two, as far as can be told."""
    forward = 2 * between.parameters
    fast = hardware.bf16 and hardware.device == "cpu" and between.compute != "float32"
    core = CORE_PRODUCTS if fast else CORE_PLAIN
    if hardware.device == "cpu":
        speed = ranks * (hardware.threads or hardware.cores) * core
    else:
        known = speed_of(hardware, between.compute)
        speed = ranks * (known.products if known is not None else SLOWEST_DEVICE)
    return forward * between.judged / (spare * core), PASSES * forward * between.trained / speed
