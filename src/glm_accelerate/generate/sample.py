"""From logits to the next token of each row: the likeliest one, or one drawn by chance.

Letters: B rows, V vocabulary.
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
        """A fresh source of chance, apart from the one that training draws from."""
        return torch.Generator(device).manual_seed(self.seed)


GREEDY = Sampling()


def pick(logits_BV: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """The next token of each row, token_B."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    probabilities_BV = (logits_BV.float() / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        probabilities_BV = likeliest(probabilities_BV, sampling.top_p)
    return torch.multinomial(probabilities_BV, 1, generator=generator)[:, 0]


def likeliest(probabilities_BV: Tensor, share: float) -> Tensor:
    """Zero for all but the fewest tokens that together reach `share`; the likeliest one always stays."""
    ordered_BV, tokens_BV = probabilities_BV.sort(-1, descending=True)
    before_BV = ordered_BV.cumsum(-1) - ordered_BV
    return torch.zeros_like(probabilities_BV).scatter(-1, tokens_BV, ordered_BV * (before_BV < share))
