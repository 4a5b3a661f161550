"""What follows from evaluations: the best step, when to stop, how often to lower the rate.

Pure functions of the results in order of their steps, up to the first that is still missing: so neither the
order in which results arrive nor how late they are can change what is decided, and a resume decides the same.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from glm_accelerate.evaluate.statistics.looks import Verdict

Status = Literal["done", "failed", "timeout", "skipped"]


@dataclass(frozen=True, slots=True)
class Judged:
    """One step as decisions see it. Without a loss it does not count: never best, and no patience lost."""

    step: int
    loss: float | None  # on one scale with the others
    status: Status
    against: int | None = None  # the step that it was compared with on the same samples
    verdict: Verdict | None = None


def answered(asked: Sequence[int], judged: Mapping[int, Judged]) -> list[Judged]:
    """The steps that were asked, in order, up to the first that is not answered."""
    found: list[Judged] = []
    for step in sorted(asked):
        if step not in judged:
            break
        found.append(judged[step])
    return found


def best(prefix: Sequence[Judged], margin: float) -> int | None:
    """The step that no later one was found better than. As good as equal: the earlier."""
    found = gains(prefix, margin)
    return found[-1] if found else None


def gains(prefix: Sequence[Judged], margin: float) -> list[int]:
    """The steps that were better than all before them."""
    return [judged.step for judged, gained in _counted(prefix, margin) if gained]


def comparable(prefix: Sequence[Judged], margin: float, until: int) -> list[int]:
    """Steps that are the best of all up to `until`, or up to a later one: that one and each gain after it."""
    found = gains(prefix, margin)
    return [step for step, later in zip_longest(found, found[1:]) if later is None or later > until]


def stopped_at(prefix: Sequence[Judged], patience: int, margin: float) -> int | None:
    """The step at which `patience` evaluations in a row had brought no gain. Once there, more results never
    change it.
    """
    waited = 0
    for judged, gained in _counted(prefix, margin):
        waited = 0 if gained else waited + 1
        if waited >= patience:
            return judged.step
    return None


def overshoot(prefix: Sequence[Judged], patience: int, margin: float, trained: int) -> int:
    """Steps that were trained after the stopping step, because its result came later."""
    stopping = stopped_at(prefix, patience, margin)
    return 0 if stopping is None else max(0, trained - stopping)


def lowered(prefix: Sequence[Judged], patience: int, margin: float) -> int:
    """How often the learning rate was lowered: each time after `patience` evaluations without gain."""
    times = waited = 0
    for _, gained in _counted(prefix, margin):
        waited = 0 if gained else waited + 1
        if waited == patience:
            times, waited = times + 1, 0
    return times


def finalists(prefix: Sequence[Judged], margin: float, most: int = 3) -> list[int]:
    """The steps to evaluate on all samples before one is called the best: the best so far, then the lowest
    losses. As good as equal in figures: the earlier.
    """
    leader = best(prefix, margin)
    counted = [judged for judged, _ in _counted(prefix, margin)]
    ordered = sorted(counted, key=lambda judged: (judged.step != leader, judged.loss, judged.step))
    return [judged.step for judged in ordered[:most]]


def _counted(prefix: Sequence[Judged], margin: float) -> Iterator[tuple[Judged, bool]]:
    """The steps that count, and whether each was better than all before it."""
    found: Judged | None = None
    for judged in prefix:
        if judged.loss is None or not math.isfinite(judged.loss):
            continue
        gained = found is None or _better(judged, found, margin)
        found = judged if gained else found
        yield judged, gained


def _better(new: Judged, old: Judged, margin: float) -> bool:
    """As it was said of the two. Where all samples that may be had say neither, or the two were not compared,
    it takes figures more than the margin apart: nothing better is known.
    """
    if new.against == old.step and new.verdict not in (None, "undecided"):
        return new.verdict == "better"
    assert new.loss is not None
    assert old.loss is not None
    return new.loss < old.loss - margin
