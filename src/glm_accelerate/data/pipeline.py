"""The data line of a run: sample numbers of each step, packed into rows, collated, made ahead of need.

The joint to everything before it is `Samples`: whatever holds samples by number.
"""

from collections.abc import Generator, Iterator, Sequence
from typing import Protocol

from glm_accelerate.data.collate import collate
from glm_accelerate.data.order import Order
from glm_accelerate.data.pack import ARRANGE
from glm_accelerate.data.prefetch import prefetch
from glm_accelerate.data.types import Batch, Sample, Step


class Samples(Protocol):
    """Samples by number."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int) -> Sample: ...


def batches(samples: Samples, numbers: Sequence[int], batching: str, micro_tokens: int) -> Iterator[Batch]:
    """The given samples as batches of at most `micro_tokens` positions."""
    taken = [samples[number] for number in numbers]
    for arrangement in ARRANGE[batching]([len(sample) for sample in taken], micro_tokens):
        yield collate(arrangement, taken)


def steps(
    samples: Samples, order: Order, *, batching: str, micro_tokens: int, position: int, total: int
) -> Generator[Step, None, None]:
    """The steps after the first `position` ones up to step `total`, made in a thread ahead of need."""

    def make() -> Iterator[Step]:
        for number, epoch, drawn in order.steps_from(position):
            if number > total:
                return
            numbers = tuple(int(sample) for sample in drawn)
            yield Step(number, epoch, tuple(batches(samples, numbers, batching, micro_tokens)), numbers)

    return prefetch(make())
