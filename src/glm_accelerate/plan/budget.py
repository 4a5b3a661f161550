"""How often to evaluate, and on how many samples, for a share of the machines' time (`evaluate.budget`).

A pure function of what a run costs: by tokens before it begins, then by the seconds that were measured.
"""

import math
from dataclasses import dataclass

from glm_accelerate.config.schema import EvaluateSection
from glm_accelerate.plan.beside import PASSES, Between

FEWEST, MOST = 10, 100  # evaluations of a run, where the config does not say how often
LEAST = 16  # samples: fewer say nothing
KEEPS_UP = 0.9  # of an evaluator's time, at the most: it would fall behind


@dataclass(frozen=True, slots=True)
class Pace:
    """How evaluations go on from a checkpoint, which holds it, and what they have cost until then."""

    every: int  # steps between two
    samples: int  # of one, at the most
    spent: float = 0.0  # seconds of all machines
    trained: float = 0.0  # seconds of training alone


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a whole run and of its evaluations, in seconds of all machines, or in anything else that counts."""

    steps: int
    left: int  # of them
    training: float  # all steps, without evaluations
    spent: float  # on evaluations so far
    sample: float  # one sample of an evaluation
    share: float = 1.0  # of the machines that evaluate; 1: training waits


def chosen(section: EvaluateSection, most: int, costs: Costs) -> Pace:
    """The evaluations that the rest of the budget pays for, the one after the last step included: as many as
    the config says (auto: 10 to 100 of a run), on `most` samples where these are affordable, else on fewer;
    at 16 samples there are fewer evaluations.
    """
    assert section.budget is not None
    given = section.every
    shortest = math.ceil(costs.steps / MOST) if given == "auto" else given
    longest = max(shortest, costs.steps // FEWEST)
    most_times, fewest = (max(1, math.ceil(costs.left / each)) for each in (shortest, longest))
    least = min(LEAST, most)
    # Where training waits, the evaluations themselves lengthen the run.
    waits = costs.share >= 1
    budget = min(section.budget, 1.0 if waits else KEEPS_UP * costs.share)
    room = max(0.0, budget * costs.training / (1 - budget if waits else 1) - costs.spent)
    affordable = room / costs.sample if costs.sample > 0 else math.inf  # samples in all
    samples = max(least, int(min(most, affordable / fewest)))
    times = max(1, int(min(most_times, affordable / samples)))
    return Pace(max(shortest, math.ceil(costs.left / times)), samples)


def begun(
    section: EvaluateSection, steps: int, work: Between, total: int, asked: tuple[int, int, str]
) -> tuple[int, int, str]:
    """Steps between two evaluations, samples of the first ones, and why: as `asked` without a budget, else by
    tokens, as nothing was measured yet. What part of the machines evaluates makes no difference to these: a
    smaller one takes longer. `total`: samples held out.
    """
    if section.budget is None:
        return asked
    training, most = PASSES * work.trained * work.times, asked[1]
    pace = chosen(section, most, Costs(steps, steps, training, 0.0, work.largest / total))
    times = f"{1 + math.ceil(steps / pace.every):,} evaluations"
    why = f"{percent(section.budget)} of the time: {times} of up to {pace.samples:,} samples by tokens"
    return pace.every, pace.samples, f"{why}, then by what they take"


def percent(share: float) -> str:
    """As people write it."""
    return f"{100 * share:.3g}%"
