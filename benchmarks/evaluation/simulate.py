"""Held-out sets with known answers: what an interval has to cover, and runs whose best step is known.

Sets differ in what makes intervals fail: long tails of lengths and losses, windows of one document, small
sources that differ from the rest. Losses are sums over a sample's targets.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from glm_accelerate.evaluate.protocol.history import score_step
from glm_accelerate.evaluate.protocol.messages import Comparison, EvaluationResult
from glm_accelerate.evaluate.statistics.decide import ScoredStep, best, finalists
from glm_accelerate.evaluate.statistics.intervals import Interval, SampleLosses, loss_interval, paired
from glm_accelerate.evaluate.statistics.samples import (
    SampleOrder,
    Verdict,
    draw_order,
    level_of,
    verdict,
)

Floats = NDArray[np.float64]
LONGEST = 2048  # what samples are cut to


@dataclass(frozen=True)
class Population:
    """All held-out samples of one set, in file order."""

    losses_N: Floats
    targets_N: Floats
    sources_N: NDArray[np.int64]

    def drawn(self, seed: int) -> tuple[SampleLosses, NDArray[np.int64]]:
        """All of them in the order of evaluation, and each one's stratum."""
        choice = self.choice(seed)
        return self.items(choice), choice.strata

    def choice(self, seed: int) -> SampleOrder:
        return draw_order(self.targets_N.astype(np.int64), self.sources_N, seed)

    def items(self, choice: SampleOrder) -> SampleLosses:
        return SampleLosses(self.losses_N[choice.order], self.targets_N[choice.order])

    @property
    def loss(self) -> float:
        return float(self.losses_N.sum() / self.targets_N.sum())


def lengths(draw: Generator, count: int) -> Floats:
    return np.minimum(LONGEST, np.ceil(draw.lognormal(5, 1, count)))


def one_source(targets_N: Floats, each_N: Floats) -> Population:
    return Population(targets_N * each_N, targets_N, np.zeros(len(targets_N), dtype=np.int64))


def mild(draw: Generator, count: int) -> Population:
    return one_source(draw.integers(20, 200, count).astype(np.float64), draw.normal(2, 0.4, count).clip(0.1))


def long_tails(draw: Generator, count: int) -> Population:
    return one_source(lengths(draw, count), draw.lognormal(0.5, 0.6, count))


def falling(draw: Generator, count: int) -> Population:
    """The longer a sample, the less a target of it costs."""
    targets_N = lengths(draw, count)
    return one_source(targets_N, 4 * targets_N**-0.15 * draw.lognormal(0, 0.4, count))


def windows(draw: Generator, count: int) -> Population:
    """Documents cut into windows of 512, some into dozens, of which all are alike."""
    document_N = np.repeat(np.arange(count), draw.geometric(0.1, count))[:count]
    targets_N = np.where(draw.random(count) < 0.8, 512.0, np.ceil(draw.uniform(1, 512, count)))
    return one_source(
        targets_N, (draw.lognormal(0.5, 0.8, count)[document_N]) * draw.lognormal(0, 0.15, count)
    )


def sources(draw: Generator, count: int) -> Population:
    """Five files of unlike size, length and difficulty."""
    sources_N = draw.choice(5, count, p=[0.4, 0.3, 0.15, 0.1, 0.05])
    targets_N = np.minimum(LONGEST, np.ceil(draw.lognormal(3.5 + sources_N * 0.5, 0.8)))
    each_N = np.array([1.1, 2.4, 1.6, 3.3, 0.6])[sources_N] * draw.lognormal(0, 0.5, count)
    return Population(targets_N * each_N, targets_N, sources_N)


Draw = Callable[[Generator, int], Population]
PROMISED: Mapping[str, Draw] = {
    "mild": mild,
    "long tails": long_tails,
    "falling with length": falling,
    "windows of documents": windows,
    "five sources": sources,
}


def changed(draw: Generator, old: Population, by: float, spread: float) -> Population:
    """Another step's losses: on average of all targets higher by exactly `by`, and each sample's a little
    more or less, in proportion to its loss and with long tails.
    """
    moved_N = old.losses_N * draw.standard_t(4, len(old.losses_N)) * spread
    moved_N += old.targets_N * (by - moved_N.sum() / old.targets_N.sum())
    return Population(old.losses_N + moved_N, old.targets_N, old.sources_N)


def covered(make: Draw, sets: int, count: int, total: int, level: float = 0.05) -> tuple[float, float]:
    """In what share of sets the interval of a sample holds the loss of all, and its mean half width."""
    hits, half = 0, 0.0
    for seed in range(sets):
        population = make(np.random.default_rng([seed, total]), total)
        items, strata = population.drawn(seed)
        _, interval = loss_interval(first(items, count), strata, total, level)
        assert interval is not None
        hits += interval[0] <= population.loss <= interval[1]
        half += (interval[1] - interval[0]) / 2
    return hits / sets, half / sets


def apart(
    new: SampleLosses, old: SampleLosses, strata: NDArray[np.int64], total: int, level: float
) -> tuple[float, Interval]:
    """`paired`, of more than one sample."""
    difference, interval = paired(new, old, strata, total, level)
    assert interval is not None
    return difference, interval


def covered_paired(make: Draw, sets: int, count: int, total: int, level: float = 0.05) -> tuple[float, float]:
    """The same of the difference between two steps."""
    hits, half = 0, 0.0
    for seed in range(sets):
        draw = np.random.default_rng([seed, total, 1])
        old = make(draw, total)
        choice = old.choice(seed)
        before, after = old.items(choice), changed(draw, old, -0.01, 0.05).items(choice)
        _, interval = apart(first(after, count), before, choice.strata, total, level)
        hits += interval[0] <= -0.01 <= interval[1]
        half += (interval[1] - interval[0]) / 2
    return hits / sets, half / sets


def fooled(make: Draw, sets: int, looks: Sequence[int], total: int, level: float) -> tuple[float, float]:
    """Two steps that are exactly equal over all samples: how often one of the looks calls the new one better,
    and how often better or worse.
    """
    better = either = 0
    for seed in range(sets):
        draw = np.random.default_rng([seed, total, 2])
        old = make(draw, total)
        choice = old.choice(seed)
        before, after = old.items(choice), changed(draw, old, 0.0, 0.05).items(choice)
        verdicts = (
            verdict(apart(first(after, count), before, choice.strata, total, level)[1], 0.0)
            for count in looks
        )
        decided = next((one for one in verdicts if one != "undecided"), None)
        better += decided == "better"
        either += decided is not None
    return better / sets, either / sets


def first(items: SampleLosses, count: int) -> SampleLosses:
    return SampleLosses(items.losses_N[:count], items.targets_N[:count])


# --- Runs of many steps. ---


@dataclass(frozen=True)
class Outcome:
    """What one way to evaluate a run chose and cost."""

    chosen: int
    cost: float  # samples evaluated, as a share of all samples at all steps
    compared: int = 0
    wrong: int = 0  # verdicts that all samples contradict
    undecided: int = 0


def run_of(draw: Generator, old: Population, curve: Sequence[float], spread: float) -> Floats:
    """Losses of all samples at each step. The full loss follows the curve; neighbours are alike."""
    steps = [old]
    for here, there in pairwise(curve):
        steps.append(changed(draw, steps[-1], there - here, spread))
    return np.stack([step.losses_N for step in steps])


def ours(
    losses_SN: Floats,
    targets_N: Floats,
    strata: NDArray[np.int64],
    looks: Sequence[int],
    margin: float,
    crown: bool,
) -> Outcome:
    """As many samples as it takes to compare each step with the best so far; `crown`: then all samples of
    the finalists.
    """
    steps, total = losses_SN.shape
    measured, scored = np.zeros(steps, dtype=np.int64), dict[int, ScoredStep]()
    verdicts: list[tuple[Verdict, float]] = []
    for step in range(steps):
        leader = best(list(scored.values()), margin)
        compared = None
        for look, count in enumerate(looks, 1):
            measured[step] = count
            if leader is None:
                break
            measured[leader] = max(measured[leader], count)
            pair = [SampleLosses(losses_SN[one, :count], targets_N[:count]) for one in (step, leader)]
            difference, interval = apart(pair[0], pair[1], strata, total, level_of(looks))
            judgement = verdict(interval, margin)
            compared = Comparison(
                leader, f"{leader}-plan-0", difference, interval, judgement, look, len(looks)
            )
            if judgement != "undecided":
                break
        if leader is not None and compared is not None:
            truth = (losses_SN[step].sum() - losses_SN[leader].sum()) / targets_N.sum()
            verdicts.append((compared.verdict, float(truth)))
        loss, _ = loss_interval(
            SampleLosses(losses_SN[step, : measured[step]], targets_N[: measured[step]]), strata, total
        )
        result = EvaluationResult(
            step, "plan", 0, "done", loss, samples=int(measured[step]), total=total, against=compared
        )
        scored[step] = score_step(result, scored)
    line = list(scored.values())
    near = finalists(line, margin) if crown else []
    measured[near] = total
    chosen = min(near, key=lambda step: (losses_SN[step].sum(), step)) if crown else best(line, margin)
    assert chosen is not None
    wrong = sum(contradicted(judgement, truth, margin) for judgement, truth in verdicts)
    undecided = sum(judgement == "undecided" for judgement, _ in verdicts)
    return Outcome(chosen, float(measured.sum()) / (steps * total), len(verdicts), wrong, undecided)


def contradicted(judgement: Verdict, truth: float, margin: float) -> bool:
    """Whether the difference over all samples is not what was said; rounding aside."""
    off = {"better": truth + margin, "worse": margin - truth, "tied": abs(truth) - margin}
    return off.get(judgement, 0.0) > 1e-9
