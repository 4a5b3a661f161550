"""A run in float16: its loss scale, and which layers are too wide for it, measured before the first step and
again when the scale has come down to its floor. All of it follows from weights and samples, so a resumed run
and every rank choose the same.
"""

from dataclasses import asdict, dataclass

import torch

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.types import Step
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.optim.precision import Scale
from glm_accelerate.optim.widen import LARGEST, Extremes, Mixed, extremes, wide_dtype
from glm_accelerate.parallel.place import Place
from glm_accelerate.runtime.seed import seed_all, step_seed
from glm_accelerate.training.life import Life
from glm_accelerate.training.passes import ForwardBackward
from glm_accelerate.training.state import Progress, Wide


@dataclass(frozen=True, slots=True)
class Half:
    """What a run in float16 has besides others."""

    model: Decoder
    mixed: Mixed
    first: float  # loss scale
    seed: int


def in_half(model: Decoder, progress: Progress, compute: str, config: RunConfig) -> Half | None:
    """For float16; None for everything else, whose progress then holds nothing of it."""
    if compute != "float16":
        progress.scale = progress.wide = None
        return None
    units = {f"layers.{number}": block for number, block in enumerate(model.layers)}
    wide = wide_dtype(model.embed.device)
    mixed = Mixed(units, model.norm, narrow=torch.float16, wide=wide)
    if progress.scale is None:
        progress.scale = Scale(config.precision.loss_scale)
    if progress.wide is not None:
        mixed.move(progress.wide.layers)
    return Half(model, mixed, config.precision.loss_scale, config.train.seed)


def widen(half: Half, step: Step, progress: Progress, passes: ForwardBackward, life: Life) -> None:
    """Before a step, where it is time to: choose which layers are wide, on the samples of that step."""
    scale, wide = progress.scale, progress.wide
    assert scale is not None
    if wide is not None and (progress.bad_in_a_row != 1 or wide.step == step.number):
        return
    found = measure(half, step, passes, life.place)
    before = () if wide is None else wide.layers
    moved = tuple(name for name in half.mixed.units if name in before or not found[name].fits)
    if wide is not None and moved != before:
        progress.scale = Scale(half.first)  # what made it fall is out of the way
    progress.wide = Wide(step.number, moved)
    half.mixed.move(moved)
    dtype = str(half.mixed.wide).removeprefix("torch.")
    life.events.emit(
        "decision",
        {
            "step": step.number,
            "said": _said(found, moved, dtype),
            "wide": dict.fromkeys(moved, dtype),
            "extremes": {name: asdict(each) for name, each in found.items()},
        },
    )


def measure(half: Half, step: Step, passes: ForwardBackward, place: Place) -> dict[str, Extremes]:
    """The extremes of a step's samples in every layer, on all ranks. The gradients are thrown away."""
    model, ranks = half.model, place.ranks
    recompute, model.recompute = model.recompute, True  # wide activations take no more room than narrow ones
    seed_all(step_seed(half.seed, step.number, place.samples[0]))
    with half.mixed.measured(half.first) as gauges:
        passes(step)
    model.zero_grad(set_to_none=True)
    model.recompute = recompute
    own = [number for gauge in gauges.values() for number in gauge.numbers()]
    slots = [0.0] * (len(own) * ranks.count)  # a rank's numbers in its own place: their sum is all of them
    slots[len(own) * ranks.rank : len(own) * (ranks.rank + 1)] = own
    told = ranks.total(slots)
    return {
        name: extremes(told[at : at + 4] for at in range(4 * place, len(told), len(own)))
        for place, name in enumerate(gauges)
    }


def _said(found: dict[str, Extremes], moved: tuple[str, ...], dtype: str) -> str:
    if not moved:
        top = max(found, key=lambda name: found[name].value)
        return f"float16 in every layer: the largest number is {found[top].value:.3g}, in {top}"
    reach = ", ".join(f"{name} (reaches {found[name].value:.3g})" for name in moved)
    return f"{dtype} instead of float16, which ends at {LARGEST:,.0f}, in {reach}"
