"""The passes of a run that need the most memory, found from lengths alone before it begins.

A pass needs what its positions, its longest document and its targets make it need. So no pass of a run needs
more than its widest one and the one with its longest sample, each with the most targets that any may have.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from glm_accelerate.data.order import Order
from glm_accelerate.data.pack import BY_TOKENS, Arrangement, Dealing, arranged, widest_for
from glm_accelerate.data.pipeline import Samples, collate
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
    """The largest that any pass of a run is, and one or two passes that are so large."""

    positions: int
    longest: int  # tokens of a document
    targets: int  # never fewer than in any pass
    count: int  # passes that a rank makes in a step, at the most; more than matter are not counted
    looked_at: int  # the last step that was looked at
    passes: tuple[Pass, ...]
    gathered: int = 0  # keys of other ranks' tokens, or of its own once more, that a pass sees


def find_largest(
    order: Order,
    targets: NDArray[np.int32],
    *,
    batching: str,
    micro_tokens: int,
    position: int,
    total: int,
    ranks: int = 1,
    matter: int = 2,
    context: int = 1,
    dealing: Dealing = BY_TOKENS,
) -> Largest:
    """Over the steps after the first `position` ones up to `total`; of a very long run, over its first steps
    and at least an epoch. `targets`: of each sample; `matter`: how many passes of a step memory depends on.

    Rows are laid only where they may be wider than all before: for most steps the lengths are enough. Where
    shares move, a rank may come to have all that its neighbours do not.
    """
    ranks = context if dealing.moves else ranks
    dealing = replace(dealing, speeds=(), together=False)  # no pass is larger, but for a rank's last
    lay = partial(
        arranged, batching=batching, micro_tokens=micro_tokens, ranks=ranks, context=context, dealing=dealing
    )
    widest: Pass | None = None
    furthest: Pass | None = None
    area = length = most_targets = gathered = 0
    longest, count = None, 0
    total = min(total, position + max(MOST_LOOKED_AT, 2 * len(order.epoch(0))))  # from within an epoch
    for number, _, drawn in order.steps_from(position):
        if number > total:
            break
        lengths = order.lengths[drawn]
        most_targets = max(most_targets, int(targets[drawn].sum()))
        if int(lengths.max()) > length:
            length, longest = int(lengths.max()), (number, drawn)
        shared = context > 1 and int(lengths.max()) > micro_tokens
        if count >= matter and not shared and widest_for(int(lengths.max()), micro_tokens) <= area:
            continue
        for own in lay(lengths.tolist()):
            count = min(matter, max(count, len(own)))
            for arrangement in own:
                one = Pass(number, tuple(drawn.tolist()), arrangement)
                if arrangement.area > area:
                    area, widest = arrangement.area, one
                if arrangement.gathered > gathered:
                    gathered, furthest = arrangement.gathered, one
    assert longest is not None, "no step is left"
    assert widest is not None
    with_longest = _with_longest(order, *longest, lay)
    last = with_longest if furthest is None else furthest  # long documents lie where most keys are gathered
    passes = (last,) if last.arrangement.area == area else (widest, last)
    return Largest(area, length, min(most_targets, area), count, total, passes, gathered)


def largest_steps(samples: Samples, largest: Largest) -> tuple[Step, ...]:
    """Steps that need at least as much memory as any of the run. In the second pass of a step gradients are
    there already, and a stage of a pipeline has several at once, so each of these has as many as matter.
    """
    times = largest.count
    steps: list[Step] = []
    for one in largest.passes:
        batch = collate(one.arrangement, [samples[number] for number in one.drawn])
        batch = _with_targets(batch, largest.targets)
        tokens, targets = times * batch.tokens, times * batch.targets
        steps.append(Step(one.step, 0, (batch,) * times, one.drawn, tokens=tokens, targets=targets))
    return tuple(steps)


def _with_longest(
    order: Order,
    number: int,
    drawn: NDArray[np.int64],
    lay: Callable[[Sequence[int]], list[list[Arrangement]]],
) -> Pass:
    """The pass of a step that has the step's longest sample."""
    lengths: Sequence[int] = order.lengths[drawn].tolist()
    place = lengths.index(max(lengths))
    passes = (one for own in lay(lengths) for one in own)
    return Pass(number, tuple(drawn.tolist()), next(a for a in passes if place in a.places))


def _with_targets(batch: Batch, targets: int) -> Batch:
    """At least so many targets: further positions predict their own token."""
    labels_RT = batch.labels_RT.copy()
    labels, tokens = labels_RT.reshape(-1), batch.tokens_RT.reshape(-1)
    more = np.flatnonzero(labels == IGNORED)[: max(0, targets - batch.targets)]
    labels[more] = tokens[more]
    return replace(batch, labels_RT=labels_RT, targets=batch.targets + len(more))
