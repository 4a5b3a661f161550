"""What the memory of a run depends on, from its config."""

from dataclasses import dataclass, replace

import torch

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.kernels.choose import Facts, Form, choose_form, facts_of
from glm_accelerate.kernels.native.build import lacking
from glm_accelerate.kernels.rms_norm import LANES
from glm_accelerate.memory.job import Job
from glm_accelerate.models.adapt import choose_layers, kind_of
from glm_accelerate.models.decoder import Decoder, Origin
from glm_accelerate.models.families import Family
from glm_accelerate.models.linear import projection_of
from glm_accelerate.models.sizes import Sizes
from glm_accelerate.plan.hardware import Hardware
from glm_accelerate.plan.levers import Setting
from glm_accelerate.runtime.device import current_device, device_kind


@dataclass(frozen=True, slots=True)
class SettledChoices:
    """What is decided before memory is looked at."""

    dtype: str  # of weights
    compute: str
    compiled: bool
    ranks: int  # that take other samples
    tensor: int
    shards: int
    shards_why: str


def setting_of(
    config: RunConfig,
    family: Family,
    sizes: Sizes,
    hardware: Hardware,
    settled: SettledChoices,
    micro_tokens: int,
) -> Setting:
    """The run as the config says it; what that leaves open is at its least effort. Passes are missing."""
    adapt, memory = config.adapt, config.memory
    full = adapt.method == "full"
    kind = kind_of(adapt)
    job = Job(
        sizes=sizes,
        method=adapt.method,
        rank=adapt.rank,
        adapted=_adapted(config, family, sizes),
        dropout=adapt.dropout,
        last=adapt.layers,
        prefix_tokens=adapt.prefix_tokens,
        prefix_width=sizes.layers * 2 * sizes.kv_heads * sizes.head_width,
        base=kind or (config.model.dtype if full else settled.dtype),
        rest=config.model.dtype,
        compute=settled.compute,
        optimizer=config.optim.name,
        clips=config.optim.clip > 0,
        recompute="blocks" if memory.recompute == "blocks" else "off",
        offload=frozenset(memory.offload) if isinstance(memory.offload, list) else frozenset(),
        fuse_update=memory.fuse_update == "on",
        ranks=settled.ranks,
        tensor=settled.tensor,
        context=config.parallel.size("context"),
        shards=settled.shards,
        zero=config.parallel.zero,
        device=hardware.device,
        form=_form(hardware, sizes, settled),
        saves=not config.checkpoint.wait,
        kept_saves=config.checkpoint.keep_last + config.checkpoint.keep_best,
    )
    return Setting(job, config.data.batching, micro_tokens)


def _adapted(config: RunConfig, family: Family, sizes: Sizes) -> tuple[str, ...] | None:
    """LoRA's layers in our words, by the last part of their name."""
    if config.adapt.targets == "all-linear" or config.adapt.method != "lora":
        return None
    with torch.device("meta"):
        model = Decoder(replace(sizes, layers=1), Origin(family.name, {}, ""))
    chosen = choose_layers(model, config.adapt.targets)
    return tuple({projection_of(name).rpartition(".")[2]: None for name, _ in chosen})


def _form(hardware: Hardware, sizes: Sizes, settled: SettledChoices) -> Form:
    """The operators' form, as `models.bind` will choose it; with Triton for a device that is not here."""
    dtype = torch.bfloat16 if settled.compute == "fp8" else getattr(torch, settled.compute)
    if device_kind(hardware.device).gpu_kernels:
        record = current_device()
        here = record.kind == hardware.device and record.name() == hardware.name
        facts = facts_of(record.device) if here else Facts(hardware.device, triton=True)
        return choose_form(facts, dtype, compiled=False)[0]
    native = lacking() if dtype == torch.bfloat16 else "they are for bfloat16"
    if sizes.width % LANES or sizes.mlp_width < LANES or sizes.head_width % 2:
        native = f"a width of {sizes.width}"
    return choose_form(Facts(hardware.device), dtype, settled.compiled, native)[0]
