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
from glm_accelerate.evaluate.metrics import meanings
from glm_accelerate.evaluate.results import EvaluationResult, Request, plan_hash


class HeldOut(Samples, Protocol):
    """Samples that are never trained on."""

    @property
    def fingerprint(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Items:
    """What was measured of the first N samples of an exam's order. A sample without targets counts 0, 0."""

    losses_N: NDArray[np.float64]  # summed over a sample's targets
    targets_N: NDArray[np.float64]

    @staticmethod
    def none() -> "Items":
        return Items(np.zeros(0), np.zeros(0))

    @staticmethod
    def of(losses: Sequence[float], targets: Sequence[float]) -> "Items":
        return Items(np.array(losses, np.float64), np.array(targets, np.float64))

    def and_then(self, more: "Items") -> "Items":
        """With those of the samples that follow."""
        return Items(
            np.concatenate([self.losses_N, more.losses_N]), np.concatenate([self.targets_N, more.targets_N])
        )


@dataclass(frozen=True, slots=True)
class Prediction:
    """One question as the model read it, what it should have said, what it said, and each metric of that."""

    prompt: str
    reference: str
    answer: str
    scores: dict[str, float]


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


@dataclass(frozen=True, slots=True)
class Findings:
    """All that one evaluation publishes."""

    result: EvaluationResult
    items: Items | None = None
    predictions: Sequence[Prediction] = ()
    extended: Items | None = None  # of the step compared with, where more of it had to be measured


class Examiner(Protocol):
    """Whoever can answer a run's requests: a GLM with its exam, or anybody's own module."""

    @property
    def plan(self) -> str: ...

    def examine(self, request: Request, run: str, against: Items | None) -> Findings:
        """`against`: what was measured of the step to compare with."""
        ...

    def smaller(self) -> bool:
        """After it ran out of memory: whether it can try again with less."""
        ...
