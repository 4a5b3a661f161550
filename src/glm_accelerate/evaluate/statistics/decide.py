"""What follows from evaluations: the best step, when to stop, how often to lower the learning rate.

Pure functions of the results in order of their steps, up to the first that is still missing. So neither the
order in which results arrive nor how late they are changes a decision, and a resumed run decides the same.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from glm_accelerate.evaluate.statistics.samples import Verdict

Status = Literal["done", "failed", "timeout", "skipped"]

MOST_FINALISTS = 3


@dataclass(frozen=True, slots=True)
class ScoredStep:
    """One step as decisions see it. Without a loss it does not count: it is never the best, and no patience
    is lost over it.
    """

    step: int
    loss: float | None  # on one scale with the others
    status: Status
    against: int | None = None  # the step that it was compared with on the same samples
    verdict: Verdict | None = None


def best(prefix: Sequence[ScoredStep], margin: float) -> int | None:
    """The step that no later one was better than. Of two that are as good as equal, the earlier."""
    steps = gains(prefix, margin)
    return steps[-1] if steps else None


def gains(prefix: Sequence[ScoredStep], margin: float) -> list[int]:
    """The steps that were better than all before them."""
    return [one.step for one, gained in _with_gains(prefix, margin) if gained]


def comparable(prefix: Sequence[ScoredStep], margin: float, until: int) -> list[int]:
    """The steps that are the best up to `until` or up to a later step: the best then and each later gain."""
    steps = gains(prefix, margin)
    return [step for step, later in zip_longest(steps, steps[1:]) if later is None or later > until]


def stopped_at(prefix: Sequence[ScoredStep], patience: int, margin: float) -> int | None:
    """The step at which `patience` evaluations in a row had brought no gain. More results never change it."""
    waited = 0
    for one, gained in _with_gains(prefix, margin):
        waited = 0 if gained else waited + 1
        if waited >= patience:
            return one.step
    return None


def times_lowered(prefix: Sequence[ScoredStep], patience: int, margin: float) -> int:
    """How often the learning rate was lowered: each time after `patience` evaluations without gain."""
    times = waited = 0
    for _, gained in _with_gains(prefix, margin):
        waited = 0 if gained else waited + 1
        if waited == patience:
            times, waited = times + 1, 0
    return times


def finalists(prefix: Sequence[ScoredStep], margin: float) -> list[int]:
    """The steps to evaluate on all samples before one is called the best: the best so far, then the lowest
    losses; of equal losses the earlier.
    """
    leader = best(prefix, margin)
    counted = [one for one, _ in _with_gains(prefix, margin)]
    ordered = sorted(counted, key=lambda one: (one.step != leader, one.loss, one.step))
    return [one.step for one in ordered[:MOST_FINALISTS]]


def _with_gains(prefix: Sequence[ScoredStep], margin: float) -> Iterator[tuple[ScoredStep, bool]]:
    """The steps that count, and whether each was better than all before it: as its comparison with the best
    of them says. Where that is undecided, or was not made, its loss has to be more than the margin lower.
    """
    lowest, leader = math.inf, None
    for one in prefix:
        if one.loss is None or not math.isfinite(one.loss):
            continue
        if one.against == leader and one.verdict not in (None, "undecided"):
            gained = one.verdict == "better"
        else:
            gained = one.loss < lowest - margin
        if gained:
            lowest, leader = one.loss, one.step
        yield one, gained
