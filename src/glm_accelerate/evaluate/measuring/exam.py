"""What every step of a run is evaluated on: the same samples in the same order, and what is measured of them.

Trainer and evaluator each make it from the run's files; they have to agree on its id.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.inputs import Inputs
from glm_accelerate.data.store import Store
from glm_accelerate.data.tokenizers import Tokenizer
from glm_accelerate.evaluate.measuring.metrics import fingerprints
from glm_accelerate.evaluate.protocol.messages import exam_id_of
from glm_accelerate.evaluate.statistics.samples import draw_order, looks
from glm_accelerate.plan.run_plan import RunPlan

SEED = 0  # of the order of samples: not the run's, so that runs compare too


@dataclass(frozen=True, slots=True)
class Exam:
    """The samples and questions of all evaluations of one run."""

    held_out: Store  # samples that are never trained on
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
        """A digest of everything that the figures depend on. The store's covers template and labels."""
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


def exam_of(config: RunConfig, plan: RunPlan, inputs: Inputs) -> Exam:
    """What the config has every step evaluated on."""
    assert inputs.dev is not None
    section, most = config.evaluate, plan.evaluate_samples
    return exam_on(
        inputs.dev,
        inputs,
        looks=looks(min(len(inputs.dev), most)) if section.samples == "auto" else (most,),
        micro_tokens=plan.micro_tokens,
        metrics=section.metrics,
        max_new_tokens=section.max_new_tokens,
        margin=section.margin,
    )


def exam_on(
    held_out: Store,
    inputs: Inputs,
    *,
    looks: tuple[int, ...],
    micro_tokens: int,
    metrics: Sequence[str],
    max_new_tokens: int,
    margin: float = 0.0,
) -> Exam:
    """An exam on any samples, in an order that depends on them alone."""
    sources = np.repeat(np.arange(len(held_out.spans)), [span.stop - span.start for span in held_out.spans])
    drawn = draw_order(held_out.lengths, sources, SEED)
    return Exam(
        held_out,
        drawn.order,
        drawn.strata,
        looks,
        micro_tokens,
        inputs.tokenizer,
        inputs.stops,
        metrics,
        max_new_tokens,
        margin,
    )
