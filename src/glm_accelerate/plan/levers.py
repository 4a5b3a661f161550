"""What may be changed about a run so that it needs less memory: the ladder's rungs, as they are typed.

Tiers say what a change costs: 0 nothing (the plan does it by itself), then only time, then rounding, then
what is trained, then the base's rounding, then time again, much of it, then more devices.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.pack import aligned, longest_share
from glm_accelerate.kernels.quantized import BLOCK
from glm_accelerate.memory.job import Job
from glm_accelerate.memory.weights import PACKED
from glm_accelerate.runtime.errors import UserError

ITSELF, TIME, ROUNDING, METHOD, BASE, OFFLOAD, DEVICES = range(7)
SHORT_PASS = 2048  # tokens: a device computes no faster with more, and no document is worth sharing
MOST_TIMES = (2, 4, 8)  # as many devices


@dataclass(frozen=True, slots=True)
class Setting:
    """A run, for all that a rung may change. `job` is complete but for its passes."""

    job: Job
    batching: str
    micro_tokens: int


@dataclass(frozen=True, slots=True)
class Option:
    """One way to have one thing. Nothing is typed for what is so already, or what the plan does by itself."""

    apply: Callable[[Setting], Setting]
    typed: tuple[str, ...] = ()
    tier: int = ITSELF
    why: str = ""


Lever = tuple[Option, ...]


def levers(config: RunConfig, setting: Setting, longest: int) -> tuple[Lever, ...]:
    """In the order of the ladder; of each lever the options from least to most."""
    found = (
        _batching(setting),
        _recompute(config),
        _micro_tokens(config, setting, aligned(longest_share(longest, setting.job.context))),
        _context(config, setting, longest),
        _optimizer(setting),
        _fused(config, setting),
        _method(config, setting),
        _base(setting),
        _offload(setting),
        _devices(setting),
    )
    as_it_is = Option(lambda setting: setting)
    return tuple(
        (as_it_is, *lever) if all(option.typed for option in lever) else lever for lever in found if lever
    )


def possible(setting: Setting) -> bool:
    """Whether the settings go together, passes included."""
    job = setting.job
    if job.base in PACKED and (job.method not in ("lora", "prefix") or job.compute == "fp8"):
        return False
    return conflict(job, float(job.clips)) is None


def _lacks(job: Job) -> Iterator[tuple[bool, str]]:
    """What ranks that share products cannot have yet, and whether this one asks for it."""
    blocks = job.sizes.mlp_width % BLOCK or job.sizes.heads * job.sizes.head_width % BLOCK
    yield job.base == "nf4" and bool(blocks), "adapt.base=nf4 and parts of its blocks"
    yield job.compute == "fp8", "precision.compute=fp8"
    yield job.optimizer in ("adamw8bit", "adafactor"), f"optim.name={job.optimizer}"


def conflict(job: Job, clip: float) -> UserError | None:
    """The first that cannot go together, by name. `clip`: the limit of all gradients' norm, 0 for none."""
    fused, float16, divided = job.fuse_update, job.compute == "float16", job.shards > 1
    moments, weights = "optimizer" in job.offload, "weights" in job.offload
    off = "memory.fuse_update=off"
    rules = (
        (
            fused and clip > 0,
            f"optim.clip={clip:g} needs the norm of all gradients before the first update, "
            "memory.fuse_update has one at a time",
            f"optim.clip=0 (optim.name=adafactor limits every update by itself), or {off}",
        ),
        (
            fused and float16,
            "precision.compute=float16 overflows now and then, memory.fuse_update cannot take a step back",
            f"precision.compute=bfloat16, or {off}",
        ),
        (fused and job.processes > 1, "memory.fuse_update is for one process", off),
        (
            fused and moments,
            "memory.offload=[optimizer] and memory.fuse_update both take gradients as they are made",
            off,
        ),
        (
            moments and job.processes > 1,
            "memory.offload=[optimizer] is for one process",
            "parallel.shard=full instead, which divides the moments over ranks",
        ),
        (
            moments and float16,
            "memory.offload=[optimizer] cannot go with precision.compute=float16",
            "precision.compute=bfloat16",
        ),
        (
            weights and job.method == "full",
            "memory.offload=[weights] moves frozen weights, and adapt.method=full has none",
            "memory.offload=[optimizer], or adapt.method=lora",
        ),
        (weights and divided, "memory.offload=[weights] cannot go with parallel.shard", "one of the two"),
        (
            divided and job.optimizer in ("adamw8bit", "adafactor"),
            f"optim.name={job.optimizer} cannot go with parallel.shard",
            "parallel.shard=off, or optim.name=adamw, whose moments are divided over ranks",
        ),
        (
            fused and job.passes > 1,
            "some step has several passes, and memory.fuse_update frees gradients after one",
            f"{off}, fewer samples a step, or a larger train.micro_tokens",
        ),
        *(
            (job.tensor > 1 and lacks, f"{what} cannot go with parallel.tensor", "one of the two")
            for lacks, what in _lacks(job)
        ),
    )
    return next((UserError(what, cure=cure) for applies, what, cure in rules if applies), None)


def up_to(lever: Lever, tier: int) -> Lever:
    """Its options of no higher tier."""
    return tuple(option for option in lever if option.tier <= tier)


def _with_job(change: Callable[[Job], Job]) -> Callable[[Setting], Setting]:
    return lambda setting: replace(setting, job=change(setting.job))


def _batching(setting: Setting) -> Lever:
    if setting.batching == "pack":
        return ()
    typed = ("data.batching=pack",)
    return (Option(lambda now: replace(now, batching="pack"), typed, TIME, "no padding"),)


def _recompute(config: RunConfig) -> Lever:
    asked = config.memory.recompute
    blocks = _with_job(lambda job: replace(job, recompute="blocks"))
    if asked == "auto":
        return Option(_with_job(lambda job: replace(job, recompute="off"))), Option(blocks)
    why = "each block keeps its input alone"
    return (Option(blocks, ("memory.recompute=blocks",), TIME, why),) if asked == "off" else ()


def _micro_tokens(config: RunConfig, setting: Setting, longest: int) -> Lever:
    """Halves down to the longest sample, which has to fit into a pass."""
    own, sizes = config.train.micro_tokens == "auto", list[int]()
    size = setting.micro_tokens
    while size > longest:
        size = max(longest, size // 2 // 64 * 64)
        sizes.append(size)

    def option(size: int) -> Option:
        typed = () if own else (f"train.micro_tokens={size}",)
        why = "the longest sample" if size == longest else "shorter passes"
        return Option(lambda now: replace(now, micro_tokens=size), typed, ITSELF if own else TIME, why)

    return tuple(map(option, [setting.micro_tokens, *sizes] if own else sizes))


def _context(config: RunConfig, setting: Setting, longest: int) -> Lever:
    """So many of the ranks share the longest documents: passes need no longer hold one."""
    job, own = setting.job, config.train.micro_tokens == "auto"

    def option(ranks: int) -> Option:
        share = aligned(longest_share(longest, ranks)) if own else setting.micro_tokens
        apply = _with_job(lambda job: replace(job, context=ranks))
        typed, why = (f"parallel.context={ranks}",), "ranks share the longest documents"
        return Option(
            lambda now: replace(apply(now), micro_tokens=min(now.micro_tokens, share)), typed, TIME, why
        )

    divide = (ranks for ranks in range(job.context + 1, job.ranks + 1) if job.ranks % ranks == 0)
    return tuple(map(option, divide)) if longest > SHORT_PASS else ()


def _optimizer(setting: Setting) -> Lever:
    job = setting.job
    if job.optimizer != "adamw" or job.method not in ("full", "freeze"):
        return ()
    apply = _with_job(lambda job: replace(job, optimizer="adamw8bit"))
    return (Option(apply, ("optim.name=adamw8bit",), ROUNDING, "moments in 8 bits"),)


def _fused(config: RunConfig, setting: Setting) -> Lever:
    job = setting.job
    if job.fuse_update or job.method not in ("full", "freeze") or job.compute == "float16":
        return ()
    apply = _with_job(lambda job: replace(job, fuse_update=True, clips=False))
    typed = ("memory.fuse_update=on", *(["optim.clip=0"] if config.optim.clip else []))
    return (Option(apply, typed, ROUNDING, "a gradient is used and freed at once"),)


def _method(config: RunConfig, setting: Setting) -> Lever:
    if setting.job.method not in ("full", "freeze"):
        return ()
    base = config.model.dtype if config.adapt.base == "auto" else config.adapt.base
    apply = _with_job(lambda job: replace(job, method="lora", base=base))
    why = "trains small matrices; wants a higher rate, as 3e-4"
    return (Option(apply, ("adapt.method=lora",), METHOD, why),)


def _base(setting: Setting) -> Lever:
    """In eight bits or four; fp8 takes what int8 takes."""

    def option(kind: str, why: str) -> Option:
        return Option(_with_job(lambda job: replace(job, base=kind)), (f"adapt.base={kind}",), BASE, why)

    four = option("nf4", "frozen weights in 4 bits (QLoRA)")
    if setting.job.base == "nf4" or setting.job.compute == "fp8":
        return ()
    return (four,) if setting.job.base in PACKED else (option("int8", "frozen weights in 8 bits"), four)


def _offload(setting: Setting) -> Lever:
    """On a CPU the host's memory is the device's."""
    parts = ("activations", "optimizer", "weights") if setting.job.device != "cpu" else ()

    def option(chosen: tuple[str, ...]) -> Option:
        apply = _with_job(lambda job: replace(job, offload=frozenset(chosen)))
        return Option(apply, (f"memory.offload=[{','.join(chosen)}]",), OFFLOAD, "to host memory and back")

    every = (chosen for count in range(1, len(parts) + 1) for chosen in combinations(parts, count))
    return tuple(option(chosen) for chosen in every if setting.job.offload < set(chosen))


def _devices(setting: Setting) -> Lever:
    if setting.job.device == "cpu":
        return ()

    def option(times: int) -> Option:
        ranks = setting.job.ranks * times
        typed = (f"--gpus {ranks}", "parallel.shard=full")
        apply = _with_job(lambda job: replace(job, ranks=ranks, shards=ranks))
        return Option(apply, typed, DEVICES, "each holds its part (train: --nproc)")

    return tuple(map(option, MOST_TIMES))
