"""What a run computes, from lengths alone: its largest passes, all that it learns from, and its padding."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glm_accelerate.data.largest import Largest, find_largest
from glm_accelerate.data.order import Order
from glm_accelerate.data.pack import aligned, arranged
from glm_accelerate.plan.cost import Work
from glm_accelerate.plan.flops import pairs

SAMPLED = 16  # steps, evenly chosen, that tell how much of the passes is padding


@dataclass(frozen=True, slots=True)
class Load:
    """The samples of a run and their order, whatever the sizes of its passes."""

    order: Order
    targets: NDArray[np.int32]
    steps: int
    steps_per_epoch: int

    @property
    def longest(self) -> int:
        """The least that a pass has to hold."""
        return aligned(int(self.order.lengths.max()))

    def work(self) -> Work:
        """Of all steps, as if every epoch drew the same."""
        tokens = pairs_seen = learnt = 0.0
        for start, stop, weight in self.order.spans:
            lengths = self.order.lengths[start:stop]
            drawn = max(weight, 1 / max(1, stop - start))  # an epoch has one sample of each source at least
            tokens += drawn * float(lengths.sum(dtype=np.int64))
            pairs_seen += drawn * pairs(lengths)
            learnt += drawn * float(self.targets[start:stop].sum(dtype=np.int64))
        epochs = self.steps / self.steps_per_epoch
        return Work(tokens * epochs, pairs_seen * epochs, learnt * epochs, self.steps)

    def largest(self, batching: str, micro_tokens: int, ranks: int) -> Largest:
        """Of its passes."""
        return find_largest(
            self.order,
            self.targets,
            batching=batching,
            micro_tokens=micro_tokens,
            position=0,
            total=self.steps,
            ranks=ranks,
        )

    def padding(self, batching: str, micro_tokens: int, ranks: int = 1) -> float:
        """How many positions are computed for each token, 1 without padding, as if each of several ranks had
        as many as the one with the most, for which the others wait.
        """
        if batching == "pack" and ranks == 1:
            return 1.0  # but for the rest of a row, which is cut
        steps = self.order.epoch(0)
        area = tokens = 0
        for place in np.linspace(0, len(steps) - 1, min(SAMPLED, len(steps))).round().astype(int):
            lengths: Sequence[int] = self.order.lengths[steps[place]].tolist()
            tokens += sum(lengths)
            shares = arranged(lengths, batching, micro_tokens, ranks)
            area += ranks * max(sum(one.area for one in own) for own in shares)
        return area / tokens
