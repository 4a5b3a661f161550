"""The plan of a config on a machine: every derived value with its reason."""

from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from glm_accelerate.config.load import override
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.inputs import Inputs
from glm_accelerate.data.order import Order
from glm_accelerate.data.pack import aligned, longest_share
from glm_accelerate.kernels.compiled import missing
from glm_accelerate.kernels.float8 import missing as no_float8
from glm_accelerate.kernels.native.build import lacking as no_native
from glm_accelerate.memory.job import Job
from glm_accelerate.memory.weights import PACKED
from glm_accelerate.models.adapt import kept_bytes, kind_of
from glm_accelerate.models.shapes import shapes_of
from glm_accelerate.plan.beside import EvaluatorPlace, between, place_of
from glm_accelerate.plan.budget import begun
from glm_accelerate.plan.dealing import dealing_of
from glm_accelerate.plan.fit import SettledChoices, setting_of
from glm_accelerate.plan.ground import Ground, Load
from glm_accelerate.plan.hardware import Hardware
from glm_accelerate.plan.layout_report import open_layouts
from glm_accelerate.plan.levers import conflict
from glm_accelerate.plan.run_plan import Memory, Reason, RunPlan
from glm_accelerate.plan.weigh import Weighed, costs_of, pipeline_waits, require_host, require_room, weigh
from glm_accelerate.runtime.device import device_kind
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.words import amount

DEFAULT_STEP_SAMPLES = 16
MOST_EVALUATED = 256  # inline: training waits for each of them
MOST_BETWEEN = 500  # steps from one evaluation to the next
LONG_WAIT = 0.25  # of a step, in a pipeline
WORTH_COMPILING = 600  # seconds: a sixth of them is saved, half a minute is paid
WORTH_NATIVE = 30  # seconds: a third of them is saved; compiling our C++ takes about ten, once a machine

T = TypeVar("T")


@dataclass(slots=True)
class Reasons:
    """What was derived so far, in the order in which people read it."""

    all: list[Reason] = field(default_factory=list[Reason])

    def say(self, name: str, value: T, why: str) -> T:
        """Note a value with its reason; it is returned."""
        self.all.append(Reason(name, f"{value:,}" if type(value) is int else str(value), why))
        return value


def resolve(config: RunConfig, ground: Ground) -> RunPlan:
    """Pure: the same config on the same ground gives the same plan."""
    return plan_and_weigh(config, ground)[0]


def fitting_plan(config: RunConfig, ground: Ground) -> RunPlan:
    """The plan of a run that fits its device; a UserError has the cure for one that does not."""
    plan, weighed = plan_and_weigh(config, ground)
    require_room(weighed)
    require_host(weighed, ground.hardware)
    return plan


def plan_and_weigh(config: RunConfig, ground: Ground) -> tuple[RunPlan, Weighed]:
    """The plan, and what else could have been chosen for its memory; where sizes of axes are open, with the
    fastest layout that fits.
    """
    plan, weighed = _planned(config, ground)
    for words, why in open_layouts(config, ground, weighed) if config.parallel.open else ():
        chosen, its = _planned(override(config, words), ground)
        if its.memory.fits:
            return _with_layout(chosen, why, config), its
    return plan, weighed


def _with_layout(plan: RunPlan, why: Reason, config: RunConfig) -> RunPlan:
    """With the reasons of what was chosen with its layout."""
    parallel, train = config.parallel, config.train
    ours = {
        "tensor": parallel.tensor == "auto",
        "context": parallel.context == "auto",
        "shards": parallel.shard == "auto",
        "tokens in one pass": train.micro_tokens == "auto",
    }
    reasons = (replace(one, why="with the layout") if ours.get(one.name) else one for one in plan.reasons)
    return replace(plan, reasons=(*reasons, why))


def _planned(config: RunConfig, ground: Ground) -> tuple[RunPlan, Weighed]:
    """With 1 for every size of an axis that is open."""
    inputs, hardware, parallel, reasons = ground.inputs, ground.hardware, config.parallel, Reasons()
    say = reasons.say
    say("model", f"{ground.family.name}, {shapes_of(ground.sizes).parameters / 1e9:.3g} B", "config.json")
    say("template", inputs.template.name, _source(config.data.template, "the model's tokenizer files"))
    ground = ground.shared(parallel.size("tensor")).staged(parallel.size("pipeline"), parallel.stages)
    load, step_samples = _load(config, ground, reasons)
    settled = _settled(config, ground, load, reasons)
    micro_tokens, why = _micro_tokens(config, ground)
    every, samples, first, place = _evaluation(config, ground, settled, load, reasons)
    weighed = _weighed(config, ground, settled, micro_tokens, load, place)
    chosen, memory, job = weighed.found.setting, weighed.memory, weighed.found.setting.job
    _say_ranks(ground, settled, weighed, reasons)
    why = "more would not fit" if chosen.micro_tokens != micro_tokens else why
    say("tokens in one pass", chosen.micro_tokens, why)
    _say_memory(config, job, memory, reasons)
    warmup_steps, codec = _warmup(config, load, reasons), _saving(config, reasons)
    cores = f"{hardware.cores} cores" + (" assumed" if hardware.assumed else "")
    say("device", hardware.name, f"{hardware.device}, {cores}")
    if error := conflict(job, config.optim.clip):
        raise error
    only_to_fit = config.memory.recompute == "auto" and job.recompute != "off"
    plan = RunPlan(
        family=ground.family.name,
        template=inputs.template.name,
        device=hardware.device,
        ranks=ground.ranks,
        shards=job.shards,
        dtype=settled.dtype,
        compute=settled.compute,
        steps=load.steps,
        steps_per_epoch=load.steps_per_epoch,
        step_samples=step_samples,
        step_tokens=config.train.step_tokens,
        micro_tokens=chosen.micro_tokens,
        recompute=job.recompute != "off",
        warmup_steps=warmup_steps,
        codec=codec,
        evaluate_every=every,
        evaluate_samples=samples,
        evaluate_first=first,
        evaluate_where=place.where,
        evaluate_device=place.device,
        evaluate_threads=place.threads,
        evaluate_seconds=round(place.seconds, 1),
        evaluate_bytes=round(place.bytes),
        reasons=tuple(reasons.all),
        compile=settled.compiled,
        offload=tuple(sorted(job.offload)),
        fuse_update=job.fuse_update,
        tensor=ground.tensor,
        query=ground.query,
        stages=job.stages,
        layer_costs=(*(costs := costs_of(weighed)).layers, costs.last) if job.stages else (),
        context=job.context,
        memory=memory,
        spare_bytes=max(0, memory.room - memory.needed) if only_to_fit else 0,
    )
    return plan, weighed


def _context(config: RunConfig, ground: Ground) -> int:
    """How many ranks share a long document."""
    asked, ranks = config.parallel.size("context"), ground.samplers
    if ranks % asked:
        what = f"parallel.context is {asked}, which does not divide {ranks} ranks that take other samples"
        raise UserError(what, cure="parallel.context=1, or a number that divides them")
    return asked


def _say_ranks(ground: Ground, settled: SettledChoices, weighed: Weighed, reasons: Reasons) -> None:
    setting = weighed.found.setting
    job = setting.job
    reasons.say("ranks", ground.ranks, "--gpus" if ground.hardware.assumed else "as launched")
    if job.stages:
        passes, waiting = pipeline_waits(weighed)
        pays = "" if waiting < LONG_WAIT else "; more or shorter passes would wait less"
        why = f"layers; {waiting:.0%} of a step of {passes} passes is waiting{pays}"
        reasons.say("stages", " + ".join(map(str, job.stages)), why)
    if job.tensor > 1:
        reasons.say("tensor", job.tensor, "the config: so many ranks share every product")
    if job.context > 1:
        most = f"up to {job.context * setting.micro_tokens:,} tokens fit"
        reasons.say("context", job.context, f"the config: ranks share what is longer than a pass, {most}")
    as_settled = job.shards == settled.shards
    reasons.say("shards", job.shards, settled.shards_why if as_settled else "divided they would need more")


def _load(config: RunConfig, ground: Ground, reasons: Reasons) -> tuple[Load, int | None]:
    """How much is learnt in how many steps, and of how many samples each."""
    inputs, dealing = ground.inputs, dealing_of(config, ground.sizes)
    tokens, train = int(inputs.train.lengths.sum()), config.train
    reasons.say("data", f"{len(inputs.train):,} samples, {tokens:,} tokens", "counted")
    asked = train.step_samples or train.step_tokens
    step_samples = train.step_samples if asked else DEFAULT_STEP_SAMPLES
    size = f"{step_samples} samples" if step_samples else f"{train.step_tokens:,} tokens"
    reasons.say("step", size, "the config" if asked else "the default")
    order = order_of(inputs, config, step_samples)
    per_epoch = len(order.epoch(0))
    steps = reasons.say(
        "steps", train.steps or order.steps_in(train.epochs or 1.0), _length_reason(config, per_epoch)
    )
    context = config.parallel.size("context")
    return Load(order, inputs.train.targets, steps, per_epoch, context, dealing), step_samples


def order_of(inputs: Inputs, config: RunConfig, step_samples: int | None) -> Order:
    """The order of a run's samples."""
    spans = tuple((span.start, span.stop, span.weight) for span in inputs.train.spans)
    return Order(inputs.train.lengths, spans, config.train.seed, step_samples, config.train.step_tokens)


def _settled(config: RunConfig, ground: Ground, load: Load, reasons: Reasons) -> SettledChoices:
    """What does not depend on how much memory there is."""
    dtype = reasons.say("weights", *_dtype(config))
    compute = reasons.say("compute", *_compute(config, ground.hardware))
    compiled, why = _compile(config, ground, compute, load)
    reasons.say("compile", "on" if compiled else "off", why)
    return SettledChoices(
        dtype, compute, compiled, ground.samplers, ground.tensor * ground.query, *_shards(config, ground)
    )


def _weighed(
    config: RunConfig,
    ground: Ground,
    settled: SettledChoices,
    micro_tokens: int,
    load: Load,
    place: EvaluatorPlace,
) -> Weighed:
    setting = setting_of(config, ground.family, ground.sizes, ground.hardware, settled, micro_tokens)
    beside, away = place.where == "beside", place.where in ("beside", "external")
    measured = ground.measurement(setting.job.form)
    job = replace(setting.job, snapshots=away, evaluator=beside and place.device == "cpu")
    if measured is not None:
        job = replace(job, process=measured.process, measured_with=measured.tensors)
    setting, speed = replace(setting, job=job), ground.speed(settled.compute, job.form)
    return weigh(config, setting, load, ground.hardware, speed, ground.pipeline)


def _say_memory(config: RunConfig, job: Job, memory: Memory, reasons: Reasons) -> None:
    asked = config.memory
    why = "fits without" if job.recompute == "off" else "else it would not fit"
    reasons.say("recompute", job.recompute, _source(asked.recompute, why))
    reasons.say("offload", ", ".join(sorted(job.offload)) or "off", _source(asked.offload, "not needed"))
    peak, room = amount(memory.watched(job.device)), f"{amount(memory.room)} {memory.room_why}"
    whose = "of a process, " if job.device == "cpu" else ""
    reasons.say("memory at most", peak, f"{whose}predicted, in the {memory.phase}; {room}")


def _warmup(config: RunConfig, load: Load, reasons: Reasons) -> int:
    warmup = config.optim.warmup
    steps = round(warmup * load.steps) if warmup < 1 else int(warmup)
    reasons.say("warm-up", f"{steps:,} steps", f"optim.warmup {warmup:g}")
    return steps


def _source(value: object, otherwise: str) -> str:
    return otherwise if value == "auto" else "the config"


def _length_reason(config: RunConfig, per_epoch: int) -> str:
    if config.train.steps:
        return f"the config; {config.train.steps / per_epoch:.2g} epochs of {per_epoch:,}"
    return f"{config.train.epochs or 1:g} epochs of {per_epoch:,}"


def _dtype(config: RunConfig) -> tuple[str, str]:
    if config.adapt.method == "full":
        return "float32", "full fine-tuning trains float32 master weights"
    if kind_of(config.adapt) is not None:
        return config.adapt.base, f"adapt.base: linear layers; the rest {config.model.dtype}"
    if config.adapt.base != "auto":
        return config.adapt.base, "adapt.base"
    return config.model.dtype, "model.dtype"


def _compute(config: RunConfig, hardware: Hardware) -> tuple[str, str]:
    asked = config.precision.compute
    if asked == "fp8":
        lacking = None if hardware.assumed else no_float8()
        if lacking or config.adapt.base in PACKED:
            why = lacking or f"a base in {config.adapt.base} is multiplied in its own way"
            raise UserError(f"precision.compute is fp8: {why}", cure="precision.compute=bfloat16")
        return asked, "the config; products of layers in 8 bits, the rest bfloat16, norms and loss float32"
    if asked == "float16":
        scale = f"the loss times {config.precision.loss_scale:,g} at first"
        return asked, f"the config; norms and loss float32, {scale}"
    if asked != "auto":
        return asked, "the config"
    if hardware.bf16:
        return "bfloat16", f"this {hardware.kind} multiplies it in hardware"
    alone = config.memory.fuse_update == "on" or "optimizer" in config.memory.offload
    if device_kind(hardware.device).float16 and not alone:
        scale = f"the loss times {config.precision.loss_scale:,g} at first"
        return "float16", f"this GPU has no fast bfloat16; norms and loss float32, {scale}"
    return "float32", f"this {hardware.kind} has no fast bfloat16"


def _shards(config: RunConfig, ground: Ground) -> tuple[int, str]:
    """How many ranks share one copy of weights, gradients and moments."""
    asked, ranks = config.parallel.shard, ground.samplers
    if ranks == 1:
        return 1, "one rank has nothing to divide"
    if asked == "full":
        return ranks, "the config"
    if asked == "off":
        return 1, "the config: every rank has its own copy"
    if asked != "auto":
        if ranks % asked:
            raise UserError(
                f"parallel.shard is {asked}, which does not divide {ranks} ranks",
                cure="a divisor, full, or off",
            )
        return asked, "the config"
    # Of the model as it is loaded to be adapted.
    weights = kept_bytes(ground.sizes, getattr(torch, config.model.dtype), kind_of(config.adapt))
    if config.adapt.method == "full":
        return ranks, "full fine-tuning: 16 bytes a weight are divided among all"
    if weights > ground.hardware.free_bytes // 2:
        return ranks, "the frozen weights would fill more than half of a device"
    return 1, "the frozen weights fit on each device: only small gradients travel"


def _compile(config: RunConfig, ground: Ground, compute: str, load: Load) -> tuple[bool, str]:
    device = ground.hardware.device
    lacking = None if ground.hardware.assumed else missing(device)
    if config.precision.compile == "on":
        if lacking:
            raise UserError(f"precision.compile is on: {lacking}", cure="install it, or say off or auto")
        return True, "the config"
    if config.precision.compile == "off":
        return False, "the config"
    if lacking or device != "cpu":
        return False, lacking or f"not measured on {device}"
    native = compute == "bfloat16" and no_native() is None
    speed = ground.speed(compute, "eager")  # whatever else was measured: else two plans would take turns
    assert speed is not None
    products = 6 * shapes_of(ground.sizes).parameters * load.work().tokens
    seconds = products / speed.products / (ground.samplers)
    if seconds < (WORTH_NATIVE if native else WORTH_COMPILING):
        return False, f"a run of about {seconds:,.0f} s does not repay compiling"
    return (
        True,
        f"a run of about {seconds:,.0f} s repays {'ten seconds' if native else 'half a minute'} of it",
    )


def _micro_tokens(config: RunConfig, ground: Ground) -> tuple[int, str]:
    context, longest = _context(config, ground), int(ground.inputs.train.lengths.max())
    if config.train.micro_tokens != "auto":
        return config.train.micro_tokens, "the config"
    longest = aligned(longest_share(longest, context))
    wanted = 8192 if ground.hardware.memory_bytes > 40 * 2**30 else 4096
    if ground.hardware.device == "cpu":
        wanted = 2048
    if longest > wanted:
        return longest, "the longest sample" if context == 1 else f"a part of {context} of the longest sample"
    return wanted, f"enough to keep a {ground.hardware.kind} busy"


def _saving(config: RunConfig, reasons: Reasons) -> str:
    """When is decided as the run goes; how is decided here."""
    section, pays = config.checkpoint, "from what a save and a failure cost, as measured"
    often = "as often as pays" if section.every == "auto" else f"every {section.every:,} steps"
    reasons.say("checkpoint", often, _source(section.every, pays))
    codec = "none" if section.codec == "auto" else section.codec
    later = "weighed after the first checkpoint, if it is large"
    return reasons.say("codec", codec, _source(section.codec, later))


def _evaluation(
    config: RunConfig, ground: Ground, settled: SettledChoices, load: Load, reasons: Reasons
) -> tuple[int, int, int, EvaluatorPlace]:
    """How often, on how many samples at the most, on how many of them at first, and where."""
    inputs, dev = ground.inputs, ground.inputs.dev
    if dev is None:
        reasons.say("evaluation", "never", "no data.dev (2% holds out a share of data.train)")
        return 0, 0, 0, EvaluatorPlace("never", "", 0, "")
    asked, wanted, total = config.evaluate.every, config.evaluate.samples, len(dev)
    if inputs.held_out:
        reasons.say("held out", f"{total:,} samples", inputs.held_out)
    every = asked if asked != "auto" else max(1, min(MOST_BETWEEN, load.steps // 10))
    often = _source(asked, f"a tenth of the run, at most {MOST_BETWEEN}")
    work = between(config, ground.sizes, inputs, load, settled, every)
    place = place_of(config, ground.hardware, ground.ranks, work)
    if wanted == "auto":
        most = min(total, MOST_EVALUATED) if place.where == "inline" else total
        why = "as many as tell a step from the best one" + ("" if most == total else f", at most {most}")
    else:
        most, why = (total if wanted == "all" else min(total, wanted)), "the config"
    up_to = "up to " if wanted == "auto" else ""
    every, first, often = begun(config.evaluate, load.steps, work, total, (every, most, often))
    reasons.say("evaluation", f"every {every:,} steps", often)
    reasons.say("where", " on ".join(filter(None, [place.where, place.device])), place.why)
    reasons.say("held-out samples", f"{up_to}{most:,} of {total:,}", why)
    return every, most, first, place
