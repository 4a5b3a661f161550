"""What an optimizer remembers, as plain tensors by the names of parameters; and back, to the same bits."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from glm_accelerate.optim.eight_bit import SCALES, put_together, take_apart

COUNT, MASTER = "step", "master"  # a count of updates; a weight in more digits than the model holds

Masters = Iterable[
    tuple[str, Tensor, bool]
]  # what moves under the name of a weight; whether it has more digits


def state_of(optimizer: Optimizer, masters: Masters) -> dict[str, Tensor]:
    """Every moment as `name::moment`, so that files name parameters and not positions."""
    state: dict[str, Tensor] = {}
    for name, parameter, ahead in masters:
        for key, value in optimizer.state.get(parameter, {}).items():
            moment = value if isinstance(value, Tensor) else torch.tensor(value)
            state |= take_apart(f"{name}::{key}", moment)
        if ahead:
            state[f"{name}::{MASTER}"] = parameter.detach()
    return state


@torch.no_grad()
def load_state(optimizer: Optimizer, masters: Masters, state: dict[str, Tensor]) -> None:
    """Take back what `state_of` gave."""
    owners = {name: parameter for name, parameter, _ in masters}
    found: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        name, _, moment = key.partition("::")
        found.setdefault(name, {})[moment] = value
    beside = bool(optimizer.param_groups[0].get("fused"))  # a fused optimizer counts where its weights are
    for name, moments in found.items():
        owner = owners[name]
        if MASTER in moments:
            owner.copy_(moments.pop(MASTER))
        optimizer.state[owner] = put_together(
            {key: part.to(owner.device if beside or key != COUNT else "cpu") for key, part in moments.items()}
        )


def shaped_otherwise(moment: str) -> bool:
    """Whether a part of the state has another shape than its weight: then every rank holds all of it."""
    return moment == COUNT or moment.endswith(SCALES)
