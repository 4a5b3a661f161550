"""What an optimizer remembers, as plain tensors by the names of parameters; and back, to the same bits.

A moment in eight bits (torchao's) is a code a weight and a float32 scale for every 256 of them; one of fewer
than 4,096 weights, or of a number that 256 does not divide, stays float32.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

COUNT, MASTER = "step", "master"  # a count of updates; a weight in more digits than the model holds
CODES, SCALES = ".codes", ".scales"  # the two parts of a moment in eight bits
SIGNED = "exp_avg"  # the first moment; the second is never negative

# For the name of a weight what the optimizer updates, and whether that has more digits.
Masters = Iterable[tuple[str, Tensor, bool]]


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
    by_name: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        name, _, moment = key.partition("::")
        by_name.setdefault(name, {})[moment] = value
    beside = bool(optimizer.param_groups[0].get("fused"))  # a fused optimizer counts where its weights are
    for name, moments in by_name.items():
        owner = owners[name]
        if MASTER in moments:
            owner.copy_(moments.pop(MASTER))
        optimizer.state[owner] = put_together(
            {key: part.to(owner.device if beside or key != COUNT else "cpu") for key, part in moments.items()}
        )


def shaped_otherwise(moment: str) -> bool:
    """Whether a part of the state has another shape than its weight: then every rank holds all of it."""
    return moment == COUNT or moment.endswith(SCALES)


def take_apart(name: str, moment: Tensor) -> dict[str, Tensor]:
    """The plain tensors of a moment, by the names that they have in files."""
    if type(moment) in (Tensor, DTensor):
        return {name: moment}
    parts: Any = moment
    return {name + CODES: parts.codes, name + SCALES: parts.scale}


def put_together(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A parameter's state from what `take_apart` gave for each of its moments."""
    state: dict[str, Tensor] = {}
    for name, part in parts.items():
        if name.endswith(CODES):
            moment = name.removesuffix(CODES)
            state[moment] = _moment(part, parts[moment + SCALES], moment == SIGNED)
        elif not name.endswith(SCALES):
            state[name] = part
    return state


def _moment(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    from torchao.optim.subclass_8bit import OptimState8bit

    block = codes.numel() // scales.numel()
    moment = OptimState8bit.zeros(codes.shape, signed, block, codes.device, dtype=torch.float32)
    moment.codes.copy_(codes)
    moment.scale.copy_(scales)
    return moment
