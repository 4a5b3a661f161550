"""AdamW with both moments in eight bits (torchao): 2.03 bytes of state a weight instead of 8.

A moment is a code a weight and a float32 scale for every 256 of them; one of fewer than 4,096 weights, or of
a number that 256 does not divide, stays float32. In files codes and scales are plain tensors.
"""

import logging
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from glm_accelerate.runtime.errors import UserError

CODES, SCALES = ".codes", ".scales"  # how the two parts of a moment are called
SIGNED = "exp_avg"  # the first moment; the second is never negative


def adamw_8bit(
    groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
) -> Optimizer:
    """torchao compiles an update for each shape in the first step."""
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


def take_apart(name: str, moment: Tensor) -> dict[str, Tensor]:
    """The plain tensors of a moment, whatever kind it is, by the names that they have in files."""
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
    made = OptimState8bit.zeros(codes.shape, signed, block, codes.device, dtype=torch.float32)
    made.codes.copy_(codes)
    made.scale.copy_(scales)
    return made
