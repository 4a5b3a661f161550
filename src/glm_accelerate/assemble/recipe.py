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
    shards: int = 1  # ranks that share one copy
    read_to: ReadTo = "device"
    offload: bool = False  # frozen weights of blocks come from the host
    copies: bool = False  # of weights that are kept in another dtype than products are computed in


def training_recipe(config: RunConfig, plan: RunPlan, files: ModelFiles) -> Recipe:
    """As planned."""
    moved = {"weights", "optimizer"} & set(plan.offload)  # read to the host, from where they come
    return replace(
        _recipe(config, plan, files, plan.shards, to_host=bool(moved)),
        compute=torch.bfloat16 if plan.compute == "fp8" else getattr(torch, plan.compute),
        float8=plan.compute == "fp8",
        recompute=plan.recompute,
        compiled=plan.compile,
        offload="weights" in moved,
    )


def evaluation_recipe(
    config: RunConfig, plan: RunPlan, files: ModelFiles, device: torch.device, shards: int
) -> Recipe:
    """The same model for another process, which only evaluates it. `shards`: its ranks, if they divide it."""
    return replace(
        _recipe(config, plan, files, shards, to_host=False),
        compute=evaluation_dtype(config, plan, device),
        compiled=plan.compile and shards == 1,
        copies=True,
    )


def evaluation_dtype(config: RunConfig, plan: RunPlan, device: torch.device) -> torch.dtype:
    """As training computes, unless the config says otherwise. 8-bit products are trained in, not evaluated;
    nor is float16: which layers it cannot hold only the trainer has measured.
    """
    name = plan.compute if config.evaluate.precision == "auto" else config.evaluate.precision
    if name == "float16":
        return wide_dtype(device)
    return torch.bfloat16 if name == "fp8" else getattr(torch, name)


def _recipe(config: RunConfig, plan: RunPlan, files: ModelFiles, shards: int, to_host: bool) -> Recipe:
    """What both have in common. A rank reads its part alone, unless merging needs the whole."""
    quantized, divided = kind_of(config.adapt), shards > 1
    return Recipe(
        files,
        config.adapt,
        config.train.seed,
        dtype=getattr(torch, config.model.dtype if quantized else plan.dtype),
        quantized=quantized,
        shards=shards,
        read_to="cpu"
        if to_host or (divided and files.begun_on is not None)
        else "meta"
        if divided
        else "device",
    )
