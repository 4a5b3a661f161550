"""Memory that is taken once. Before its first step a run goes through the largest passes that it will ever
make (data/largest.py) beside moments that are there already: what does not fit is known in seconds, not after
hours, and nothing that comes later takes more from the device. Nothing of it stays: a run with and one
without are the same to the last bit.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch.optim import Optimizer

from glm_accelerate.data.types import Step
from glm_accelerate.memory.monitor import ran_out
from glm_accelerate.runtime.device import device_of
from glm_accelerate.runtime.errors import UserError

CURE = "train.micro_tokens or data.max_tokens lower, or memory.recompute=blocks"


def rehearse(
    steps: Sequence[Step],
    optimizer: Optimizer,
    forward_backward: Callable[[Step], object],
    device: torch.device,
) -> str:
    """Go through `steps` as they would be trained, and forget them: no gradient stays, and generators are as
    they were. `forward_backward` adds gradients up and moves no weight. Returns what to tell people of it.
    """
    began = time.perf_counter()
    with device_of(device).fork_random():
        for step in steps:
            _through(step, forward_backward)
            optimizer.zero_grad(set_to_none=True)
    device_of(device).synchronize()
    widest = max(steps, key=lambda step: step.batches[0].tokens_RT.size)
    positions, count = widest.batches[0].tokens_RT.size, sum(len(step.batches) for step in steps)
    passes = "1 pass" if count == 1 else f"{count} passes"
    fits = f"the largest pass fits: {positions:,} positions, of step {widest.number:,}"
    return f"{fits}; {passes} rehearsed in {time.perf_counter() - began:.1f} s"


@torch.no_grad()
def make_moments(optimizer: Optimizer) -> None:
    """All state that updates will need, where there is none yet: by updates with gradients of zero at a rate
    of zero, which change no weight, leave moments at zero, and are not counted. One weight after the other:
    not even all gradients may have room at once.
    """
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * 0  # of a number or, with some optimizers, a tensor
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype)
            optimizer.step()
            optimizer.state[weight]["step"].zero_()
            weight.grad = None
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _through(step: Step, forward_backward: Callable[[Step], object]) -> None:
    try:
        forward_backward(step)
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        largest = step.batches[-1]
        longest = max(max(row) for row in largest.documents)
        where = f"a pass of {largest.tokens_RT.size:,} positions, documents of up to {longest:,} tokens"
        raise UserError(f"step {step.number:,} would run out of memory: {where}", cure=CURE) from error
