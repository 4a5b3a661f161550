"""From what the user said and the machine there is to a plan: every derived value with its reason."""

from collections.abc import Callable
from dataclasses import dataclass

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.inputs import Inputs, open_inputs
from glm_accelerate.data.order import Order
from glm_accelerate.data.pack import aligned
from glm_accelerate.models.families import Family
from glm_accelerate.models.locate import locate
from glm_accelerate.models.sizes import Sizes
from glm_accelerate.models.weights import read_config
from glm_accelerate.plan.hardware import Hardware, detect
from glm_accelerate.plan.run_plan import Reason, RunPlan

DEFAULT_STEP_SAMPLES = 16
MOST_EVALUATED = 256
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Ground:
    """What a plan stands on."""

    family: Family
    sizes: Sizes
    inputs: Inputs
    hardware: Hardware


def plan_for(config: RunConfig, progress: Callable[[str, int, int], None] | None = None) -> RunPlan:
    """The plan of a config on this machine; prepares the data if it is not cached."""
    directory = locate(config.model.path)
    family, sizes, _ = read_config(directory)
    inputs = open_inputs(config.data, directory, progress)
    return resolve(config, Ground(family, sizes, inputs, detect()))


def resolve(config: RunConfig, ground: Ground) -> RunPlan:
    """Pure: the same config on the same ground gives the same plan."""
    reasons: list[Reason] = []

    def say(name: str, value: object, why: str) -> None:
        reasons.append(Reason(name, str(value), why))

    inputs = ground.inputs
    say("model", f"{ground.family.name}, {ground.sizes.parameters / 1e9:.3g} B", "config.json")
    say("template", inputs.template.name, _said(config.data.template, "the model's tokenizer files"))
    say("data", f"{len(inputs.train):,} samples, {int(inputs.train.lengths.sum()):,} tokens", "counted")
    step_samples = _step_samples(config)
    order = order_of(inputs, config, step_samples)
    per_epoch = len(order.epoch(0))
    steps = config.train.steps or order.steps_in(config.train.epochs or 1.0)
    asked = config.train.step_samples or config.train.step_tokens
    size = f"{step_samples} samples" if step_samples else f"{config.train.step_tokens:,} tokens"
    say("step", size, "the config" if asked else "the default")
    say("steps", f"{steps:,}", _length_reason(config, per_epoch))
    micro_tokens, why = _micro_tokens(config, ground)
    say("tokens in one pass", f"{micro_tokens:,}", why)
    recompute, why = _recompute(config, ground, micro_tokens)
    say("recompute", "blocks" if recompute else "off", why)
    dtype, why = _dtype(config)
    say("weights", dtype, why)
    compute, why = _compute(config, ground.hardware)
    say("compute", compute, why)
    warmup = round(config.optim.warmup * steps) if config.optim.warmup < 1 else int(config.optim.warmup)
    say("warm-up", f"{warmup:,} steps", f"optim.warmup {config.optim.warmup:g}")
    every = config.checkpoint.every
    saved = every if every != "auto" else max(1, min(500, steps // 10))
    say("checkpoint", f"every {saved:,} steps", _said(every, "a tenth of the run, at most 500"))
    evaluated, judged = _evaluation(config, inputs, saved, say)
    _say_what_waits(config, ground.hardware, say)
    return RunPlan(
        family=ground.family.name,
        template=inputs.template.name,
        device=ground.hardware.device,
        dtype=dtype,
        compute=compute,
        steps=steps,
        steps_per_epoch=per_epoch,
        step_samples=step_samples,
        step_tokens=config.train.step_tokens,
        micro_tokens=micro_tokens,
        recompute=recompute,
        warmup_steps=warmup,
        checkpoint_every=saved,
        evaluate_every=evaluated,
        evaluate_samples=judged,
        reasons=tuple(reasons),
    )


def _say_what_waits(config: RunConfig, hardware: Hardware, say: Callable[[str, object, str], None]) -> None:
    """Where the run happens, and what a config may ask for that this version does not do yet."""
    say("device", hardware.name, f"{hardware.device}, {hardware.cores} cores")
    if config.parallel.shard != "off":
        say("shard", "off", "one device has nothing to divide")
    say("offload", "off", "not built yet")
    say(
        "codec",
        "none",
        "compression is not built yet" if config.checkpoint.codec == "zstd" else "the default",
    )


def order_of(inputs: Inputs, config: RunConfig, step_samples: int | None) -> Order:
    """The order of a run's samples."""
    spans = tuple((span.start, span.stop, span.weight) for span in inputs.train.spans)
    return Order(inputs.train.lengths, spans, config.train.seed, step_samples, config.train.step_tokens)


def _step_samples(config: RunConfig) -> int | None:
    asked = config.train.step_samples
    return DEFAULT_STEP_SAMPLES if asked is None and config.train.step_tokens is None else asked


def _said(value: object, otherwise: str) -> str:
    return otherwise if value == "auto" else "the config"


def _length_reason(config: RunConfig, per_epoch: int) -> str:
    if config.train.steps:
        return f"the config; {config.train.steps / per_epoch:.2g} epochs of {per_epoch:,}"
    return f"{config.train.epochs or 1:g} epochs of {per_epoch:,}"


def _dtype(config: RunConfig) -> tuple[str, str]:
    if config.adapt.method == "full":
        return "float32", "full fine-tuning trains float32 master weights"
    if config.adapt.base != "auto":
        return config.adapt.base, "adapt.base"
    return config.model.dtype, "model.dtype"


def _compute(config: RunConfig, hardware: Hardware) -> tuple[str, str]:
    if config.precision.compute != "auto":
        return config.precision.compute, "the config"
    if hardware.bf16:
        return "bfloat16", f"this {hardware.device} multiplies it in hardware"
    return "float32", f"this {hardware.device} has no fast bfloat16"


def _micro_tokens(config: RunConfig, ground: Ground) -> tuple[int, str]:
    if config.train.micro_tokens != "auto":
        return config.train.micro_tokens, "the config"
    longest = aligned(int(ground.inputs.train.lengths.max()))
    wanted = 8192 if ground.hardware.memory_bytes > 40 * 2**30 else 4096
    if ground.hardware.device == "cpu":
        wanted = 2048
    if longest > wanted:
        return longest, "the longest sample"
    return wanted, f"enough to keep a {ground.hardware.device} busy"


def _recompute(config: RunConfig, ground: Ground, micro_tokens: int) -> tuple[bool, str]:
    if config.memory.recompute != "auto":
        return config.memory.recompute == "blocks", "the config"
    if ground.hardware.device == "cpu":
        return False, "memory of the host is not the limit"
    sizes = ground.sizes
    kept = sizes.layers * micro_tokens * (20 * sizes.width + 8 * sizes.mlp_width) * ITEM_BYTES["bfloat16"]
    room = ground.hardware.free_bytes - sizes.parameters * ITEM_BYTES[config.model.dtype]
    return kept > room // 2, f"activations would take about {kept / 2**30:.1f} of {room / 2**30:.1f} GiB"


def _evaluation(
    config: RunConfig, inputs: Inputs, saved: int, say: Callable[[str, object, str], None]
) -> tuple[int, int]:
    if inputs.dev is None:
        say("evaluation", "never", "no data.dev")
        return 0, 0
    every = config.evaluate.every if config.evaluate.every != "auto" else saved
    wanted = config.evaluate.samples
    judged = min(len(inputs.dev), MOST_EVALUATED if wanted == "auto" else wanted)
    say("evaluation", f"every {every:,} steps", _said(config.evaluate.every, "with each checkpoint"))
    say("held-out samples", f"{judged:,} of {len(inputs.dev):,}", _said(wanted, f"at most {MOST_EVALUATED}"))
    say("where", "inline", "one device: training waits")
    return every, judged
