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
from glm_accelerate.evaluate.statistics.samples import SampleOrder, draw_order, looks
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
    held_out, section, most = inputs.dev, config.evaluate, plan.evaluate_samples
    assert held_out is not None
    drawn = sample_order_of(held_out)
    return Exam(
        held_out=held_out,
        order=drawn.order,
        strata=drawn.strata,
        looks=looks(min(len(held_out), most)) if section.samples == "auto" else (most,),
        micro_tokens=plan.micro_tokens,
        tokenizer=inputs.tokenizer,
        stops=inputs.stops,
        metrics=section.metrics,
        max_new_tokens=section.max_new_tokens,
        margin=section.margin,
    )


def sample_order_of(store: Store) -> SampleOrder:
    """The order in which its samples are evaluated."""
    sources = np.repeat(np.arange(len(store.spans)), [span.stop - span.start for span in store.spans])
    return draw_order(store.lengths, sources, SEED)
