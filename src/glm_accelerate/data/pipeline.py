"""The data line of a run: sample numbers of each step, packed into rows, collated, made ahead of need.

The joint to everything before it is `Samples`: whatever holds samples by number.
"""

from collections.abc import Generator, Iterator, Sequence
from typing import Protocol

from glm_accelerate.data.collate import collate, empty_batch
from glm_accelerate.data.deal import deal
from glm_accelerate.data.order import Order
from glm_accelerate.data.pack import ARRANGE, Arrangement
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
    samples: Samples,
    order: Order,
    *,
    batching: str,
    micro_tokens: int,
    position: int,
    total: int,
    rank: int = 0,
    ranks: int = 1,
) -> Generator[Step, None, None]:
    """The steps after the first `position` ones up to step `total`, made in a thread ahead of need.

    They hold the batches of one of `ranks` ranks. All have equally many, if need be empty ones: models that
    are divided over ranks compute together.
    """

    def make() -> Iterator[Step]:
        for number, epoch, drawn in order.steps_from(position):
            if number > total:
                return
            taken = [samples[int(sample)] for sample in drawn]
            made = arranged([len(sample) for sample in taken], batching, micro_tokens, ranks)
            own = [collate(arrangement, taken) for arrangement in made[rank]]
            own += [empty_batch()] * (max(map(len, made)) - len(own))
            yield Step(
                number,
                epoch,
                tuple(own),
                tuple(int(sample) for sample in drawn),
                tokens=sum(len(sample) for sample in taken),
                targets=sum(int(sample.targets[1:].sum()) for sample in taken),
            )

    return prefetch(make())


def arranged(lengths: Sequence[int], batching: str, micro_tokens: int, ranks: int) -> list[list[Arrangement]]:
    """Each rank's passes of a step, from the lengths of its samples."""
    made: list[list[Arrangement]] = []
    for share in deal(lengths, ranks):
        rows = ARRANGE[batching]([lengths[place] for place in share], micro_tokens) if share else []
        made.append([arrangement.of(share) for arrangement in rows])
    return made
