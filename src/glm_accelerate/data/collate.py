"""From samples and their arrangement to a Batch of numbers."""

from collections.abc import Sequence

import numpy as np

from glm_accelerate.data.pack import Arrangement
from glm_accelerate.data.types import DOCUMENT_ALIGNMENT, IGNORED, Batch, Sample


def collate(arrangement: Arrangement, samples: Sequence[Sample]) -> Batch:
    """Rows with one sample are one document, padding and all: a causal model never looks into the tail."""
    shape = (len(arrangement.rows), arrangement.width)
    tokens_RT = np.zeros(shape, dtype=np.int64)
    labels_RT = np.full(shape, IGNORED, dtype=np.int64)
    documents: list[tuple[int, ...]] = []
    for number, row in enumerate(arrangement.rows):
        start = 0
        lengths: list[int] = []
        for index in row:
            sample = samples[index]
            stop = start + len(sample)
            tokens_RT[number, start:stop] = sample.tokens
            labels_RT[number, start : stop - 1] = np.where(sample.targets[1:], sample.tokens[1:], IGNORED)
            lengths.append(len(sample))
            start = stop
        tail = arrangement.width - start
        if len(row) == 1:
            lengths = [arrangement.width]
        elif tail:
            lengths.append(tail)
        documents.append(tuple(lengths))
    members = [index for row in arrangement.rows for index in row]
    return Batch(
        tokens_RT=tokens_RT,
        labels_RT=labels_RT,
        documents=tuple(documents),
        samples=len(members),
        tokens=sum(len(samples[index]) for index in members),
        targets=int((labels_RT != IGNORED).sum()),
    )


def empty_batch() -> Batch:
    """The smallest forward pass, from which nothing is learnt."""
    shape = (1, DOCUMENT_ALIGNMENT)
    tokens_RT, labels_RT = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
    return Batch(tokens_RT, labels_RT, ((DOCUMENT_ALIGNMENT,),), samples=0, tokens=0, targets=0)
