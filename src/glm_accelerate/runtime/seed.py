"""Randomness as a function: the seed of a step depends only on the run's seed and the step's number.

So a resumed run draws what the uninterrupted one would have drawn, with no generator state to save.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

from glm_accelerate.runtime.device import device_kind
from glm_accelerate.runtime.env import repeat_products

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: consecutive numbers land far apart
SILVER = 0x6A09E667F3BCC909  # the fraction of sqrt(2): another stride, for ranks


def step_seed(seed: int, step: int, share: int = 0) -> int:
    """64 well-mixed bits, different for each step and share of its samples; close seeds are unrelated."""
    return _mix(_mix(seed & MASK) + step * GOLDEN + share * SILVER)


def seed_all(seed: int) -> None:
    """Seed the CPU's generator and every GPU's."""
    torch.manual_seed(seed & MASK)  # covers CUDA, also before its first use


@contextmanager
def repeat_exactly(device: torch.device) -> Generator[None, None, None]:
    """Within this, the same sums in the same order each time. A CPU does so anyway; on a GPU some operators
    have a faster form that does not. With `warn_only` the backward pass of attention would keep atomic sums.
    """
    if device_kind(device.type).deterministic:
        yield
        return
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True, warn_only=not repeat_products())
    # It would fill every new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before > 0, warn_only=before == 1)


def repeating(work: Callable[[], object]) -> str | None:
    """Do `work`. If one of its operators has no deterministic form, allow such operators from now on, do it
    again, and return what to tell the user: torch warns of each of them once.
    """
    try:
        work()
    except RuntimeError as error:
        if not _refused_as_nondeterministic(error):
            raise
        torch.use_deterministic_algorithms(True, warn_only=True)
        work()
        return f"two equal runs may differ in their last bits: {str(error).partition('. ')[0]}"
    return None


def _refused_as_nondeterministic(error: RuntimeError) -> bool:
    strict = torch.are_deterministic_algorithms_enabled()
    strict = strict and not torch.is_deterministic_algorithms_warn_only_enabled()
    return strict and "use_deterministic_algorithms(True" in str(error)


def _mix(value: int) -> int:
    """A bijection on 64 bits in which every input bit reaches every output bit (splitmix64's finisher)."""
    value = (value + GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)
