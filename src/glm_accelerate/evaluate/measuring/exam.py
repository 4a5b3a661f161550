"""What is asked of every step of a run: the same samples in the same order, and what is measured of them.

Trainer and evaluator both make it from the run's files; `plan` is the name on which they have to agree.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from glm_accelerate.data.pipeline import Samples
from glm_accelerate.data.tokenizers import Tokenizer
from glm_accelerate.evaluate.measuring.metrics import meanings
from glm_accelerate.evaluate.protocol.messages import plan_hash


class HeldOut(Samples, Protocol):
    """Samples that are never trained on."""

    @property
    def fingerprint(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Exam:
    """One run's questions."""

    held_out: HeldOut
    order: NDArray[np.int64]  # of all samples; the first n of it are the sample of size n
    strata: NDArray[np.int64]  # of each sample of `order`: what it was drawn as a part of
    looks: tuple[int, ...]  # after so many samples it is asked whether they are enough
    micro_tokens: int
    tokenizer: Tokenizer
    stops: Collection[int]  # tokens that end an answer
    metrics: Sequence[str]  # loss, exact_match, bleu, rouge, or a user's own as FILE.py:FUNCTION
    max_new_tokens: int
    margin: float = 0.0  # losses closer than this are as good as equal

    @property
    def plan(self) -> str:
        """Names what is asked. How samples were written (template, labels) is in the store's fingerprint."""
        return plan_hash(
            {
                "store": self.held_out.fingerprint,
                "order": self.order.tolist(),
                "looks": self.looks,
                "tokenizer": self.tokenizer.fingerprint,
                "stops": sorted(self.stops),
                "metrics": meanings(self.metrics),
                "max_new_tokens": self.max_new_tokens,
                "margin": self.margin,
            }
        )
