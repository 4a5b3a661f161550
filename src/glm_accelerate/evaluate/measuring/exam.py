"""What every step of a run is evaluated on: the same samples in the same order, and what is measured of them.

Trainer and evaluator each make it from the run's files; they have to agree on its id.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from glm_accelerate.data.pipeline import Samples
from glm_accelerate.data.tokenizers import Tokenizer
from glm_accelerate.evaluate.measuring.metrics import fingerprints
from glm_accelerate.evaluate.protocol.messages import exam_id_of


class HeldOut(Samples, Protocol):
    """Samples that are never trained on."""

    @property
    def fingerprint(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Exam:
    """The samples and questions of all evaluations of one run."""

    held_out: HeldOut
    order: NDArray[np.int64]  # of all samples; the first n of it are the sample of size n
    strata: NDArray[np.int64]  # the stratum of each sample of `order`
    looks: tuple[int, ...]  # numbers of samples after which to look whether they are enough
    micro_tokens: int
    tokenizer: Tokenizer
    stops: Collection[int]  # tokens that end an answer
    metrics: Sequence[str]  # loss, exact_match, bleu, rouge, or a user's own as FILE.py:FUNCTION
    max_new_tokens: int
    margin: float = 0.0  # losses that differ by less are as good as equal

    @property
    def id(self) -> str:
        """A digest of all that figures depend on. The store's fingerprint covers template and labels."""
        return exam_id_of(
            {
                "store": self.held_out.fingerprint,
                "order": self.order.tolist(),
                "looks": self.looks,
                "tokenizer": self.tokenizer.fingerprint,
                "stops": sorted(self.stops),
                "metrics": fingerprints(self.metrics),
                "max_new_tokens": self.max_new_tokens,
                "margin": self.margin,
            }
        )
