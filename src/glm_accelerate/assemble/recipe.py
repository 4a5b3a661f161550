"""How a model is made of its files, as data: what `assemble` follows, for training and for all others."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from glm_accelerate.config.schema import AdaptSection, RunConfig
from glm_accelerate.kernels.quantized import Kind
from glm_accelerate.models.adapt import kind_of
from glm_accelerate.optim.widen import wide_dtype
from glm_accelerate.plan.run_plan import RunPlan

ReadTo = Literal["device", "cpu", "meta"]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files that a model is made of."""

    directory: Path  # the model's
    begun_on: Path | None = None  # a checkpoint or a model whose weights take the place of the directory's
    adapter: Path | None = None  # whose matrices training begins on


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model from its files to the device. `adapt` None: nothing is added, and all weights can train."""

    files: ModelFiles
    adapt: AdaptSection | None
    seed: int = 0  # of adapters
    dtype: torch.dtype | None = None  # of weights as they are read; None: as in files
    quantized: Kind | None = None
    compute: torch.dtype | None = None  # None: as they are kept
    float8: bool = False  # products in 8 bits
    recompute: bool = False
    compiled: bool = False
    read_to: ReadTo = "device"
    offload: bool = False  # frozen weights of blocks come from the host
    stages: tuple[int, ...] = ()  # how many layers each has; (): all are together
    gather_narrow: bool = False  # trained matrices travel in bfloat16, in which alone they are multiplied
    copies: bool = False  # of weights that are kept in another dtype than products are computed in


def training_recipe(config: RunConfig, plan: RunPlan, files: ModelFiles) -> Recipe:
    """The model of a run, as planned."""
    moved = {"weights", "optimizer"} & set(plan.offload)  # read to the host, and sent from there
    return replace(
        _recipe(config, plan, files, divided=plan.divided, to_host=bool(moved)),
        compute=torch.bfloat16 if plan.compute == "fp8" else getattr(torch, plan.compute),
        float8=plan.compute == "fp8",
        recompute=plan.recompute,
        compiled=plan.compile,
        gather_narrow=plan.compute == "bfloat16",
        offload="weights" in moved,
        stages=plan.stages,
    )


def evaluation_recipe(
    config: RunConfig, plan: RunPlan, files: ModelFiles, device: torch.device, divided: bool
) -> Recipe:
    """A run's model for other processes that only evaluate it. `divided`: each has a part of it."""
    return replace(
        _recipe(config, plan, files, divided, to_host=False),
        compute=evaluation_dtype(config, plan, device),
        compiled=plan.compile and not divided,
        copies=True,
    )


def evaluation_dtype(config: RunConfig, plan: RunPlan, device: torch.device) -> torch.dtype:
    """Training's own, unless the config says otherwise. 8-bit products and float16 are for training alone:
    only the trainer has measured which layers float16 cannot hold.
    """
    name = plan.compute if config.evaluate.precision == "auto" else config.evaluate.precision
    if name == "float16":
        return wide_dtype(device)
    return torch.bfloat16 if name == "fp8" else getattr(torch, name)


def _recipe(config: RunConfig, plan: RunPlan, files: ModelFiles, divided: bool, to_host: bool) -> Recipe:
    """What both recipes share. A rank reads its part alone, unless merging needs the whole."""
    quantized = kind_of(config.adapt)
    read_to: ReadTo = "meta" if divided else "device"
    if to_host or (divided and files.begun_on is not None):
        read_to = "cpu"
    return Recipe(
        files,
        config.adapt,
        config.train.seed,
        dtype=getattr(torch, config.model.dtype if quantized else plan.dtype),
        quantized=quantized,
        read_to=read_to,
    )
