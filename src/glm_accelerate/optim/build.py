"""The optimizer of a run. Matrices decay, norms and biases never do."""

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Adafactor, AdamW, Optimizer

from glm_accelerate.optim.eight_bit import adamw_8bit
from glm_accelerate.optim.host import HostOptimizer
from glm_accelerate.optim.one_pass import OnePassAdamW

if TYPE_CHECKING:
    from glm_accelerate.config.schema import OptimSection


def build_optimizer(
    named: Iterable[tuple[str, Tensor]],
    section: "OptimSection",
    *,
    native: bool = False,
    host: torch.device | None = None,
    compute: torch.dtype | None = None,
) -> Optimizer:
    """An optimizer over everything that requires a gradient. `native`: our own CPU operators are there.
    `host`: it works in host memory, for weights on this device that are multiplied in `compute`.
    """
    trained = [parameter for _, parameter in named if parameter.requires_grad]
    groups = [
        {
            "params": [parameter for parameter in trained if parameter.ndim >= 2],
            "weight_decay": section.weight_decay,
        },
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    make = partial(_make, section, native)
    return make(groups) if host is None else HostOptimizer(groups, make, host, dtype=compute)


def _make(section: "OptimSection", native: bool, groups: list[dict[str, Any]]) -> Optimizer:
    """By name. Of AdamW, the fastest that takes these weights."""
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
