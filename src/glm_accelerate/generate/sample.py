"""From logits to the next token of each row: the likeliest one, or one drawn by chance.

Letters: B rows, V vocabulary, C blocks of it, J words of a block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from glm_accelerate.runtime.errors import UserError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are picked. Temperature 0 is greedy; `top_p` draws only from the likeliest tokens that
    together have that probability. The same seed and the same prompts give the same answers.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature is {self.temperature}", cure="0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}", cure="above 0 and at most 1")

    def generator(self, device: torch.device) -> torch.Generator:
        """A generator of its own: training draws from another."""
        return torch.Generator(device).manual_seed(self.seed)


GREEDY = Sampling()
BLOCK = 512  # words whose greatest is found at once


def pick(logits_BV: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """The next token of each row, token_B."""
    if sampling.temperature == 0:
        return greatest(logits_BV)
    wide_BV = logits_BV.float()
    below_BV = wide_BV - wide_BV.amax(-1, keepdim=True)  # first: a quotient may be beyond all numbers
    probabilities_BV = (below_BV / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        probabilities_BV = likeliest(probabilities_BV, sampling.top_p)
    return torch.multinomial(probabilities_BV, 1, generator=generator)[:, 0]


def greatest(logits_BV: Tensor) -> Tensor:
    """The first place where each row is greatest: argmax, which crawls on a CPU, in two steps: the large one,
    which only compares, is fast.
    """
    B, V = logits_BV.shape
    if logits_BV.device.type != "cpu" or V < 2 * BLOCK:
        return logits_BV.argmax(-1)
    whole = V - V % BLOCK
    tops_BC = logits_BV[:, :whole].view(B, -1, BLOCK).amax(-1)
    if whole < V:
        tops_BC = torch.cat((tops_BC, logits_BV[:, whole:].amax(-1, keepdim=True)), 1)
    places_BJ = (tops_BC.argmax(-1, keepdim=True) * BLOCK + torch.arange(BLOCK)).clamp_(max=V - 1)
    return places_BJ.gather(1, logits_BV.gather(1, places_BJ).argmax(-1, keepdim=True))[:, 0]


def likeliest(probabilities_BV: Tensor, share: float) -> Tensor:
    """Zero for all but the fewest tokens that together reach `share`; the likeliest one always stays."""
    ordered_BV, tokens_BV = probabilities_BV.sort(-1, descending=True)
    before_BV = ordered_BV.cumsum(-1) - ordered_BV
    return torch.zeros_like(probabilities_BV).scatter(-1, tokens_BV, ordered_BV * (before_BV < share))
