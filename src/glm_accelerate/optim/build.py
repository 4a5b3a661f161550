"""The optimizer of a run: by its config, where the plan has it, and in which form. Matrices decay, norms and
biases never do.
"""

import logging
import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adafactor, AdamW, Optimizer

from glm_accelerate.config.schema import OptimSection
from glm_accelerate.kernels.native.build import load as native_library
from glm_accelerate.models.bind import bind_operators
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.optim.host import HostOptimizer
from glm_accelerate.optim.mover import Mover, mover_of
from glm_accelerate.optim.one_pass import OnePassAdamW
from glm_accelerate.parallel.table import CutTable
from glm_accelerate.plan.run_plan import RunPlan
from glm_accelerate.runtime.errors import UserError


def build_mover(
    section: OptimSection, plan: RunPlan, model: Decoder, table: CutTable, device: torch.device
) -> Mover:
    """The optimizer and what it does with gradients. If the plan has it on the host, weights come to the
    device from there, and narrower.
    """
    named, clip = table.weights.items(), section.clip
    if "optimizer" not in plan.offload:
        optimizer = build_optimizer(named, section, native=model.form == "native")
        return mover_of(optimizer, table, clip, fused=table.weights.values() if plan.fuse_update else None)
    native = native_library() is None
    optimizer = build_optimizer(named, section, native=native, host=device, compute=model.compute)
    model.to(device)
    bind_operators(model, compiled=plan.compile)
    return mover_of(optimizer, table, clip)


def build_optimizer(
    named: Iterable[tuple[str, Tensor]],
    section: OptimSection,
    *,
    native: bool = False,
    host: torch.device | None = None,
    compute: torch.dtype | None = None,
) -> Optimizer:
    """An optimizer over everything that requires a gradient. `native`: our own CPU operators are there.
    `host`: it works in host memory, for weights on this device that are multiplied in `compute`.
    """
    trained = [parameter for _, parameter in named if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    others = [parameter for parameter in trained if parameter.ndim < 2]
    decays = ((matrices, section.weight_decay), (others, 0.0))
    groups = [{"params": params, "weight_decay": decay} for params, decay in decays if params or not trained]
    make = partial(_make, section, native)
    return make(groups) if host is None else HostOptimizer(groups, make, host, dtype=compute)


def _make(section: OptimSection, native: bool, groups: list[dict[str, Any]]) -> Optimizer:
    """The optimizer of that name. Of AdamW, the fastest that takes these weights."""
    if section.name == "adafactor":
        # Not all updates at once, as torch has it on a GPU: they would take the room of all gradients again.
        return Adafactor(groups, lr=section.learning_rate, beta2_decay=-0.8, foreach=False)
    rule: dict[str, Any] = {"lr": section.learning_rate, "betas": section.betas, "eps": section.epsilon}
    if section.name == "adamw8bit":
        return adamw_8bit(groups, **rule)
    weights = [weight for group in groups for weight in group["params"]]
    if native and all(type(weight) is nn.Parameter and weight.dtype == torch.float32 for weight in weights):
        return OnePassAdamW(groups, **rule)
    return AdamW(groups, **rule, fused=True)


def adamw_8bit(
    groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
) -> Optimizer:
    """AdamW with both moments in eight bits, 2.03 bytes of state a weight instead of 8. torchao compiles an
    update for each shape in the first step.
    """
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it names what it has for other processors
    warnings.filterwarnings("ignore", "OptimState8bit does not implement _stable_hash_for_caching")
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise UserError(
            "optim.name=adamw8bit is torchao's, which is not here",
            cure="pip install torchao, or optim.name=adafactor",
        ) from error
    return AdamW8bit(list(groups), lr=lr, betas=betas, eps=eps)
