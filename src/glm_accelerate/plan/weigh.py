"""A run's memory weighed against its device: what the plan chooses by itself, and what a person could choose.

A run that does not fit is refused before its model is loaded, with the words that make it fit.
"""

import re
import shlex
from dataclasses import dataclass, replace
from functools import cache

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.pack import aligned
from glm_accelerate.memory.estimate import estimate
from glm_accelerate.plan.cost import Speed, layer_costs, run_flops
from glm_accelerate.plan.ground import Load
from glm_accelerate.plan.hardware import Hardware
from glm_accelerate.plan.ladder import Ladder, PlannedRun, about
from glm_accelerate.plan.levers import ITSELF, Lever, Setting, levers, up_to
from glm_accelerate.plan.run_plan import Memory
from glm_accelerate.plan.schedule import LayerCosts, cut_stages, idle
from glm_accelerate.runtime.device import device_kind
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.words import amount, read_amount

STAND_IN = Speed(1e14, 1e12, "")  # of a device of which only the memory is known: times compare, and no more
PLAIN = re.compile(r"[\w@%+=:,./-]+")  # what every shell takes as it stands
GRAIN = 1 << 28  # bytes: what is free is never the same twice, and a plan should be
MARGIN = 1.1  # of what is predicted, to go on anyway


@dataclass(frozen=True, slots=True)
class Weighed:
    """A run on its device. `found` is what the plan chose of all that the config leaves to it."""

    ladder: Ladder
    levers: tuple[Lever, ...]
    setting: Setting
    found: PlannedRun
    memory: Memory
    speed: Speed | None


@dataclass(frozen=True, slots=True)
class Rung:
    """A change with all those above it: what it comes to, and how much longer the run takes."""

    override: str
    why: str
    bytes: int
    times: float  # as long as planned
    wanted: bool  # belongs to the cheapest change that suffices


@dataclass(frozen=True, slots=True)
class Advice:
    """For a run that does not fit. `overrides` is the cheapest change that makes it fit, if any does."""

    taken: tuple[str, ...]  # rungs on which the run stands already
    rungs: tuple[Rung, ...]
    overrides: tuple[str, ...] | None
    bytes: int  # needed with them; without any that suffices, the least that the ladder reaches
    times: float
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Duration:
    """How long a run takes, and from what that follows."""

    seconds: float | None  # None: nothing is known of the device's speed
    flops: float  # that the mathematics needs
    tokens: float
    why: str


def weigh(
    config: RunConfig,
    setting: Setting,
    load: Load,
    hardware: Hardware,
    speed: Speed | None,
    pipeline: int = 1,
) -> Weighed:
    """In so many stages. Frozen weights that are divided only because there are many are whole where that
    needs less: what is gathered of them comes on top.
    """
    if pipeline > 1:
        return _weigh_stages(config, setting, load, hardware, speed, pipeline)
    divided = _weigh(config, setting, load, hardware, speed)
    if config.parallel.shard != "auto" or config.adapt.method == "full" or setting.job.shards == 1:
        return divided
    whole = replace(setting, job=replace(setting.job, shards=1))
    alone = _weigh(config, whole, load, hardware, speed)
    return divided if divided.memory.needed < alone.memory.needed else alone


def _weigh(
    config: RunConfig, setting: Setting, load: Load, hardware: Hardware, speed: Speed | None
) -> Weighed:
    """The fastest that fits of the settings that the config leaves open; if none does, the smallest."""
    room, why = _room(config, hardware, setting.job.processes)
    ladder = Ladder(load, speed or STAND_IN, room, setting.micro_tokens)
    every = levers(config, setting, aligned(int(load.order.lengths.max())))
    own = [up_to(lever, ITSELF) for lever in every]
    found = ladder.judge(setting, [lever[0] for lever in own])  # the least effort is the fastest
    if found.needed > room:
        found = ladder.cheapest(setting, own, most=ITSELF) or ladder.least(setting, own)
    memory = Memory(found.estimate.items, found.estimate.phase, found.needed, room, why)
    return Weighed(ladder, every, setting, found, memory, speed)


def _weigh_stages(
    config: RunConfig,
    setting: Setting,
    load: Load,
    hardware: Hardware,
    speed: Speed | None,
    pipeline: int,
) -> Weighed:
    """With the layers divided into stages of which the slowest is as fast as possible; where these do not fit
    but others do, of those. As the config says, if it does.
    """
    costs = layer_costs(setting.job, load.work(), speed or STAND_IN)

    def weighed(stages: tuple[int, ...]) -> Weighed:
        staged = replace(setting, job=replace(setting.job, stages=stages))
        return _weigh(config, staged, load, hardware, speed)

    asked = config.parallel.stages
    if asked:
        return weighed(asked)
    stages = cut_stages(costs, pipeline)
    assert stages is not None
    fastest = weighed(stages)
    least, room = fastest.found.setting.job, fastest.memory.room

    estimated = cache(estimate)

    def fits(stage: int, start: int, stop: int) -> bool:
        return about(least.of_stage(stage, pipeline, start, stop), estimated) <= room

    other = None if fastest.memory.fits else cut_stages(costs, pipeline, fits)
    return fastest if other is None else weighed(other)


def pipeline_waits(weighed: Weighed) -> tuple[int, float]:
    """How many passes a step has in a pipeline, and the share of it in which a stage waits for another."""
    job, work = weighed.found.setting.job, weighed.ladder.work
    passes = max(1, round(work.tokens / work.steps / job.ranks / job.pass_tokens))
    return passes, idle(costs_of(weighed).of_stages(job.stages), passes)


def costs_of(weighed: Weighed) -> LayerCosts:
    """Of the layers that stages divide."""
    return layer_costs(weighed.found.setting.job, weighed.ladder.work, weighed.speed or STAND_IN)


def _room(config: RunConfig, hardware: Hardware, ranks: int) -> tuple[int, str]:
    """Bytes of a device that a run may use: as the config says, or what is free; ranks on a CPU share what
    the host has.
    """
    limit = None if config.memory.limit == "auto" else read_amount(config.memory.limit)
    if limit is not None:
        return limit, "allowed by memory.limit"
    free = hardware.free_bytes
    if hardware.device != "cpu":
        free += device_kind(hardware.device).context_bytes  # it is there already, and estimated with the rest
        return free // GRAIN * GRAIN, f"free on {hardware.name}"
    shared = f" for each of {ranks} ranks" if ranks > 1 else ""
    return free // ranks // GRAIN * GRAIN, f"free on this host{shared}"


def advise(weighed: Weighed) -> Advice:
    """The ladder, and where on it the run fits."""
    ladder, planned = weighed.ladder, weighed.found.seconds
    best = ladder.cheapest(weighed.setting, weighed.levers)
    wanted = set(best.typed) if best is not None else set[str]()
    rungs = tuple(
        Rung(
            " ".join(option.typed),
            option.why,
            found.needed,
            found.seconds / planned,
            set(option.typed) <= wanted,
        )
        for option, found in ladder.rungs(weighed.setting, weighed.levers)
    )
    reached = best or ladder.least(weighed.setting, weighed.levers)
    return Advice(
        _taken(weighed.found.setting),
        rungs,
        best.typed if best is not None else None,
        reached.needed,
        reached.seconds / planned,
        reached.seconds if weighed.speed is not None else None,
    )


def _taken(setting: Setting) -> tuple[str, ...]:
    recompute = ("memory.recompute=blocks",) if setting.job.recompute != "off" else ()
    packed = ("data.batching=pack",) if setting.batching == "pack" else ()
    return (*packed, "a chunked loss", *recompute, f"train.micro_tokens={setting.micro_tokens}")


def duration(weighed: Weighed, tokens_per_second: float | None = None) -> Duration:
    """The run's duration by what is assumed of the device, or by what `bench step` measured on one."""
    ladder, job = weighed.ladder, weighed.found.setting.job
    flops, tokens = run_flops(job, ladder.work) * job.tensor, ladder.work.tokens
    if tokens_per_second is not None:
        why = f"{tokens_per_second:,.0f} tokens/s, as measured"
        return Duration(tokens / tokens_per_second / job.ranks, flops, tokens, why)
    if weighed.speed is None:
        return Duration(None, flops, tokens, "nothing is known of this device's speed: name it")
    rehearsed = weighed.found.seconds * min(1.0, job.passes * job.pass_tokens / tokens)  # before step 1
    first = weighed.speed.first + rehearsed
    return Duration(weighed.found.seconds + first, flops, tokens, weighed.speed.why)


def require_room(weighed: Weighed) -> None:
    """Raises a UserError with the cure, if the run does not fit."""
    memory = weighed.memory
    if memory.fits:
        return
    advice, needed = advise(weighed), memory.needed
    anyway = f"memory.limit={-(-int(needed * MARGIN) // 2**20)}MiB to try it anyway"
    if advice.overrides is None:
        cure = f"nothing here makes it fit: the least is {amount(advice.bytes)}; {anyway}"
    else:
        cure = f"{typed(advice.overrides, 'train')} needs {amount(advice.bytes)}; or {anyway}"
    what = f"a step needs {amount(needed)}, {amount(memory.room)} are {memory.room_why}"
    raise UserError(f"does not fit: {what}", cure=cure)


def require_host(weighed: Weighed, hardware: Hardware) -> None:
    """What is moved off a device has to have room on its host."""
    job, found = weighed.found.setting.job, weighed.found.estimate
    ranks = min(job.processes, hardware.count)  # on one host
    needed = ranks * (found.host - found.spared)
    if hardware.device != "cpu" and needed > hardware.host_bytes:
        has = amount(hardware.host_bytes)
        raise UserError(
            f"does not fit: {ranks} ranks need {amount(needed)} of host memory, there are {has}",
            cure="less in memory.offload, or a smaller adapt.base",
        )


def typed(overrides: tuple[str, ...], verb: str) -> str:
    """The words to type behind a verb, which alone has a name for more devices."""
    words = " ".join(overrides).split()
    words = ["--nproc" if word == "--gpus" and verb == "train" else word for word in words]
    return " ".join(map(quoted, words))


def quoted(word: str) -> str:
    """For a shell; letters of any language need no quotes."""
    return word if PLAIN.fullmatch(word) else shlex.quote(word)
