"""The mask of a dropout. On a CPU torch draws it one number at a time; drawing 16 bits an element from a
counter-free generator, seeded by torch's, is ten times faster. On a GPU with Triton no mask is kept: it is
drawn again from its seed in the backward pass.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from glm_accelerate.kernels.choose import facts_of

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
WORDS = 1 << 16  # an element is dropped if its 16 random bits are below share * WORDS


@dataclass(frozen=True, slots=True)
class Seeded:
    """A mask that is drawn again from its seed."""

    seed: int
    share: float


Keep = Tensor | Seeded | None  # nothing is dropped, a mask of ones and zeros, or a seed


def draw(like: Tensor, share: float) -> Keep:
    """What a dropout keeps between the passes. The seed comes from torch's CPU generator: no GPU waits."""
    if not share:
        return None
    if facts_of(like.device).triton and like.dtype != torch.float64:
        return Seeded(int(torch.randint(1 << 31, ())), share)
    return keep_mask(like, share)


def drop(x: Tensor, keep: Keep) -> Tensor:
    """x with zeros where an element is dropped; the rest is not scaled up."""
    if isinstance(keep, Seeded):
        from glm_accelerate.kernels.triton_dropout import dropped  # here: only some machines have Triton

        return dropped(x.contiguous(), keep.seed, keep.share)
    return x if keep is None else x * keep


def add_dropped(total: Tensor, x: Tensor, keep: Keep) -> None:
    """total += drop(x), where x is the caller's own."""
    if isinstance(keep, Seeded):
        from glm_accelerate.kernels.triton_dropout import dropped

        dropped(x, keep.seed, keep.share, into=total)
    else:
        total += x if keep is None else x.mul_(keep)


def keep_mask(like: Tensor, share: float) -> Tensor:
    """Ones where an element stays, zeros where it is dropped, in the shape and dtype of `like`.

    The rest is not scaled up here: divide by 1 - share where it is cheapest. Follows torch.manual_seed.
    """
    if like.device.type != "cpu":
        return torch.empty_like(like).bernoulli_(1 - share)
    seed = int(torch.randint(1 << 62, ()))
    raw = np.random.SFC64(seed).random_raw(-(-like.numel() // 4)).view(np.uint16)[: like.numel()]
    one = torch.ones((), dtype=like.dtype).view(INTEGERS[like.itemsize]).numpy()
    # The bits of 1.0 where an element stays: a conversion from bool would take longer than the rest.
    words = np.multiply(raw >= round(share * WORDS), one, dtype=one.dtype)
    return torch.from_numpy(words).view(like.dtype).view(like.shape)
