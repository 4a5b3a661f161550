"""A run's memory compared with the plan: a warning when it drifts, an error that helps when it runs out, and
who else holds memory of the device. Takes plain numbers.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from glm_accelerate.runtime.device import ACCELERATORS, device_of
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.host import Holder
from glm_accelerate.runtime.words import amount

MARGIN = 0.05  # beyond the prediction: a warning from there on
FULL = 0.85  # of the prediction, held between steps: the next step has to do with what is free in there
SHARES = {"cpu": 0.5}  # of the memory, held by others: no warning up to there
SHARE = 0.1  # on other devices
NAMED = 3  # of the others at most
# In errors that have no type of their own: of torch's CPU allocator, of C++, of devices beside torch's.
OUT_OF_MEMORY = (
    *("can't allocate memory", "not enough memory", "Cannot allocate memory", "bad_alloc"),
    *(words for kind in ACCELERATORS for words in kind.out_of_memory),
)


@dataclass(slots=True)
class Monitor:
    """Watches a run. `predicted`: bytes at the most; `cure`: what is typed to need less."""

    predicted: int
    cure: str
    margin: float = MARGIN
    warned: bool = False
    positions: int = 0  # of the largest pass of the step before

    def fragments(self, positions: int, held: int) -> bool:
        """Before a step on a CPU: whether it would find only holes that smaller passes have left between
        small things, and take more memory, so that `held` should be given back first. That costs a tenth of
        a step.
        """
        larger, self.positions = positions > self.positions, positions
        return larger and held > FULL * self.predicted

    def drift(self, step: int, peak: int) -> str | None:
        """The warning, the first time that a step's peak is well beyond the prediction."""
        beyond = peak / self.predicted - 1
        if self.warned or beyond <= self.margin:
            return None
        self.warned = True
        predicted = f"the {amount(self.predicted)} that the plan had said"
        likely = "likely memory that is free in pieces too small, or other libraries of this process"
        return f"step {step} needed {amount(peak)} at its most, {beyond:.0%} more than {predicted} ({likely})"

    def exhausted(
        self, step: int, lengths: Sequence[int], in_use: int, others: Sequence[Holder]
    ) -> UserError:
        """The error when a step ran out. `lengths`: of its samples; `in_use`: bytes, when it did."""
        held = f", others held {_together(others)}" if others else ""
        samples = f"{len(lengths)} samples of {min(lengths):,} to {max(lengths):,} tokens"
        predicted = f"the plan had said {amount(self.predicted)}{held}"
        what = f"out of memory in step {step}, {samples}: {amount(in_use)} were in use, {predicted}"
        return UserError(what, cure=f"{self.cure} goes on from the last checkpoint")


def ran_out(error: BaseException) -> bool:
    """Whether an error says that there was no memory left, on a device or the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)


def crowded(holders: Sequence[Holder], device: str, whole: int) -> str | None:
    """The warning, if others hold more than a share of the device's memory."""
    held = sum(holder.bytes for holder in holders)
    if held <= SHARES.get(device, SHARE) * whole:
        return None
    return f"other processes hold {amount(held)} of {amount(whole)}: {_together(holders)}"


def others_on(device: torch.device) -> list[Holder]:
    """Who else holds memory of the device, the largest first: by its driver, on a CPU by /proc."""
    ours = os.getpgid(0)
    # A number that no process here has may be our own, as it is called outside of our container.
    others = (holder for holder in device_of(device).holders() if _group(holder.pid) not in (ours, None))
    return sorted(others, key=lambda holder: -holder.bytes)


def _group(pid: int) -> int | None:
    """Its process group: ranks, workers and the writer are in ours. None: no such process here."""
    try:
        return os.getpgid(pid)
    except OSError:
        return None


def _together(holders: Sequence[Holder]) -> str:
    more = f" and {len(holders) - NAMED} more" if len(holders) > NAMED else ""
    return ", ".join(map(str, holders[:NAMED])) + more
