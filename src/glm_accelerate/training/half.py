"""A run in float16: its loss scale, and which layers it cannot hold, measured before the first step and
again when the scale has come down to its floor. All of it follows from weights and samples, so a resumed run
and every rank choose the same.
"""

from dataclasses import asdict, dataclass

import torch

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.types import Step
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.optim.precision import Scale
from glm_accelerate.optim.widen import LARGEST, Extremes, Gauge, Mixed, extremes, wide_dtype
from glm_accelerate.parallel.place import Place
from glm_accelerate.runtime.seed import seed_all, step_seed
from glm_accelerate.training.life import Life
from glm_accelerate.training.state import Progress, Wide
from glm_accelerate.training.step import ForwardBackward


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
    units = {f"layers.{number}": block for number, block in model.layers.named_children()}
    last = model.norm if model.stage is None or model.stage.last else None
    mixed = Mixed(units, last, narrow=torch.float16, wide=wide_dtype(model.embed.device))
    if model.stage is not None:
        model.stage.carries = lambda number: mixed.dtype(f"layers.{number - 1}", f"layers.{number}")
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
    measured = measure(half, step, passes, life.place)
    before = () if wide is None else wide.layers
    moved = tuple(name for name in measured if name in before or not measured[name].fits)
    if wide is not None and moved != before:
        progress.scale = Scale(half.first)  # what made it fall is out of the way
    progress.wide = Wide(step.number, moved)
    half.mixed.move(moved)
    dtype = str(half.mixed.wide).removeprefix("torch.")
    life.events.emit(
        "decision",
        {
            "step": step.number,
            "said": _in_words(measured, moved, dtype),
            "wide": dict.fromkeys(moved, dtype),
            "extremes": {name: asdict(each) for name, each in measured.items()},
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
    layers = len(model.layers) if model.stage is None else model.stage.layers
    names = [f"layers.{number}" for number in range(layers)]
    nothing = Gauge(half.first)  # of layers that are elsewhere
    own = [number for name in names for number in gauges.get(name, nothing).numbers()]
    slots = [0.0] * (len(own) * ranks.count)  # a slice for each rank's numbers: their sum is all of them
    slots[len(own) * ranks.rank : len(own) * (ranks.rank + 1)] = own
    numbers = ranks.total(slots)
    return {
        name: extremes(numbers[at : at + 4] for at in range(4 * index, len(numbers), len(own)))
        for index, name in enumerate(names)
    }


def _in_words(measured: dict[str, Extremes], moved: tuple[str, ...], dtype: str) -> str:
    if not moved:
        top = max(measured, key=lambda name: measured[name].value)
        return f"float16 in every layer: the largest number is {measured[top].value:.3g}, in {top}"
    reach = ", ".join(f"{name} (reaches {measured[name].value:.3g})" for name in moved)
    return f"{dtype} instead of float16, which ends at {LARGEST:,.0f}, in {reach}"
