"""The passes of a run that need the most memory, found from lengths alone before it begins.

A pass needs what its positions, its longest document and its targets make it need. So no pass of a run needs
more than its widest one and the one with its longest sample, each with the most targets that any may have.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from glm_accelerate.data.collate import collate
from glm_accelerate.data.order import Order
from glm_accelerate.data.pack import Arrangement, widest_for
from glm_accelerate.data.pipeline import Samples, arranged
from glm_accelerate.data.types import IGNORED, Batch, Step

MOST_LOOKED_AT = 20_000  # steps, but at least an epoch's: later epochs draw the same samples in other orders


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass that a step will make on some rank."""

    step: int
    drawn: tuple[int, ...]  # the step's samples
    arrangement: Arrangement  # of places in them


@dataclass(frozen=True, slots=True)
class Largest:
    """What the passes of a run come to at most, and one or two that are so large."""

    positions: int
    longest: int  # tokens of a document
    targets: int  # never fewer than in any pass
    several: bool  # whether some rank makes more than one pass in a step
    looked_at: int  # the last step that was looked at
    passes: tuple[Pass, ...]


def find_largest(
    order: Order,
    targets: NDArray[np.int32],
    *,
    batching: str,
    micro_tokens: int,
    position: int,
    total: int,
    ranks: int = 1,
) -> Largest:
    """Over the steps after the first `position` ones up to `total`; of a very long run, over its first steps
    and at least an epoch. `targets`: of each sample.

    Rows are laid only where there may be news: for most steps a look at their lengths is enough.
    """
    found: Pass | None = None  # the widest
    widest = length = targeted = 0
    longest, several = None, False
    total = min(total, position + max(MOST_LOOKED_AT, 2 * len(order.epoch(0))))  # from within an epoch
    for number, _, drawn in order.steps_from(position):
        if number > total:
            break
        lengths = order.lengths[drawn]
        targeted = max(targeted, int(targets[drawn].sum()))
        if int(lengths.max()) > length:
            length, longest = int(lengths.max()), (number, drawn)
        if several and widest_for(int(lengths.max()), micro_tokens) <= widest:
            continue
        for own in arranged(lengths.tolist(), batching, micro_tokens, ranks):
            several |= len(own) > 1
            for made in own:
                if made.area > widest:
                    widest, found = made.area, Pass(number, tuple(drawn.tolist()), made)
    assert longest is not None, "no step is left"
    assert found is not None
    with_longest = _holding(order, *longest, batching, micro_tokens, ranks)
    passes = (with_longest,) if with_longest.arrangement.area == widest else (found, with_longest)
    return Largest(widest, length, min(targeted, widest), several, total, passes)


def largest_steps(samples: Samples, found: Largest) -> tuple[Step, ...]:
    """Steps that need at least what any of the run does. In the second pass of a step gradients are there
    already, so where there are such passes each of these has two.
    """
    return tuple(_step(samples, one, found.targets, 1 + found.several) for one in found.passes)


def _step(samples: Samples, one: Pass, targets: int, times: int) -> Step:
    """A pass, so many times, with so many targets."""
    batch = _learning(collate(one.arrangement, [samples[number] for number in one.drawn]), targets)
    tokens, targets = times * batch.tokens, times * batch.targets
    return Step(one.step, 0, (batch,) * times, one.drawn, tokens=tokens, targets=targets)


def _holding(
    order: Order, number: int, drawn: NDArray[np.int64], batching: str, micro_tokens: int, ranks: int
) -> Pass:
    """The pass of a step that has the step's longest sample."""
    lengths: Sequence[int] = order.lengths[drawn].tolist()
    place = lengths.index(max(lengths))
    made = (one for own in arranged(lengths, batching, micro_tokens, ranks) for one in own)
    return Pass(number, tuple(drawn.tolist()), next(a for a in made if any(place in row for row in a.rows)))


def _learning(batch: Batch, targets: int) -> Batch:
    """The same with more targets: further positions predict their own token."""
    labels_RT = batch.labels_RT.copy()
    labels, tokens = labels_RT.reshape(-1), batch.tokens_RT.reshape(-1)
    more = np.flatnonzero(labels == IGNORED)[: max(0, targets - batch.targets)]
    labels[more] = tokens[more]
    return replace(batch, labels_RT=labels_RT, targets=batch.targets + len(more))
