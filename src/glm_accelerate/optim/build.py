"""The optimizer of a run. Matrices decay, norms and biases never do."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Adafactor, AdamW, Optimizer

from glm_accelerate.optim.one_pass import OnePassAdamW

if TYPE_CHECKING:
    from glm_accelerate.config.schema import OptimSection


def build_optimizer(
    named: Iterable[tuple[str, Tensor]], section: "OptimSection", *, native: bool = False
) -> Optimizer:
    """An optimizer over everything that requires a gradient. `native`: our own CPU operators are there."""
    trained = [parameter for _, parameter in named if parameter.requires_grad]
    groups = [
        {
            "params": [parameter for parameter in trained if parameter.ndim >= 2],
            "weight_decay": section.weight_decay,
        },
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if section.name == "adafactor":
        return Adafactor(groups, lr=section.learning_rate, beta2_decay=-0.8)
    rate, betas, epsilon = section.learning_rate, section.betas, section.epsilon
    if native and all(type(weight) is nn.Parameter and weight.dtype == torch.float32 for weight in trained):
        return OnePassAdamW(groups, lr=rate, betas=betas, eps=epsilon)
    return AdamW(groups, lr=rate, betas=betas, eps=epsilon, fused=True)


def optimizer_state(optimizer: Optimizer, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Every moment as `name::moment`, so that files name parameters and not positions."""
    state: dict[str, Tensor] = {}
    for name, parameter in named:
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"{name}::{key}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    return state


def load_optimizer_state(
    optimizer: Optimizer, named: Iterable[tuple[str, Tensor]], state: dict[str, Tensor]
) -> None:
    """Take back what `optimizer_state` gave."""
    parameters = dict(named)
    for key, value in state.items():
        name, _, moment = key.partition("::")
        parameter = parameters[name]
        # Moments live beside their weight, and so does the count of steps: the optimizer is fused.
        optimizer.state[parameter][moment] = value.to(parameter.device)
