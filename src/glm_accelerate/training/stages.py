"""Stages that move: how long each computes is measured as a run goes (`parallel.balance=measured`). At a
checkpoint layers go from slow stages to others, if the steps that are left repay a start from it.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median

from glm_accelerate.data.types import Step
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.parallel.pipeline import Stage
from glm_accelerate.parallel.place import Axes
from glm_accelerate.plan.run_plan import RunPlan
from glm_accelerate.plan.schedule import LayerCosts, cut_stages, piped_seconds
from glm_accelerate.runtime.device import Stopwatch
from glm_accelerate.training.life import Life
from glm_accelerate.training.pass_cost import of_all
from glm_accelerate.training.settle import Settled
from glm_accelerate.training.state import Progress
from glm_accelerate.training.step import batches_of

WINDOW, FEWEST = 20, 5  # steps that are looked at: at the most, at the least
ENOUGH = 0.5  # seconds of computing, below which they say nothing
PAYS = 0.1  # of a step, which other stages have to save
REPAID = 2.0  # times the seconds of a start, which all steps that are left have to save


@dataclass(slots=True)
class StageBalance:
    """One rank's part in it. All ranks call the same methods at the same steps."""

    life: Life
    progress: Progress
    plan: RunPlan
    watch: Stopwatch  # over what this rank's stage computes
    fits: Callable[[Sequence[int]], bool]  # whether stages of so many layers do; asked on the first rank
    start: float  # seconds that a start takes
    moved: tuple[int, ...] = ()  # the stages to go on with
    _first: int = field(init=False)  # the step that sets up
    _seen: deque[tuple[float, int]] = field(default_factory=lambda: deque[tuple[float, int]](maxlen=WINDOW))

    def __post_init__(self) -> None:
        self._first = self.progress.position + 1

    def after(self, step: Step) -> None:
        """Note what a step took."""
        seconds = self.watch.read()
        if step.number > self._first:
            self._seen.append((seconds, len(batches_of(step, self.life.place))))

    def at_save(self) -> bool:
        """Whether the run should go on from here with other stages."""
        if len(self._seen) < FEWEST:
            return False
        passes = mean(count for _, count in self._seen)
        # The usual pass: one that stood still while something else had the processor says nothing of layers.
        seconds = passes * median(taken / max(1, count) for taken, count in self._seen)
        every = of_all(self.life.place, seconds)
        busy = busy_of([taken for (taken,) in every], self.life.place.axes)
        if min(busy) * len(self._seen) < ENOUGH:
            return False
        left, count = self.plan.steps - self.progress.position, max(1, round(passes))
        costs = LayerCosts(self.plan.layer_costs[:-1], last=self.plan.layer_costs[-1])
        found = better_stages(costs, self.plan.stages, busy, count, left, self.start)
        if found is None or not self.life.ranks.decide(lambda: self.fits(found[0])):
            return False
        self.moved, now, then = found
        said = f"stages of {_words(self.plan.stages)} layers compute {_words(busy)} seconds of a step"
        said += f": on with {_words(self.moved)}, {now / then - 1:.0%} faster by that"
        fields = {"step": self.progress.position, "stages": self.moved, "seconds": busy}
        self.life.events.emit("decision", {**fields, "said": said})
        return True


def better_stages(
    costs: LayerCosts, stages: Sequence[int], busy: Sequence[float], passes: int, left: int, start: float
) -> tuple[tuple[int, ...], float, float] | None:
    """Stages to go on with, and seconds of a step now and then; None if those that there are had better stay.
    `busy`: seconds that each computes in a step of so many passes; `left`: steps; `start`: seconds of one.
    """
    slow = [seconds / cost for seconds, cost in zip(busy, costs.of_stages(stages), strict=True)]
    cut = cut_stages(costs, len(busy), slow=slow)
    assert cut is not None
    new = [times * cost for times, cost in zip(slow, costs.of_stages(cut), strict=True)]
    now, then = (piped_seconds([each / passes for each in one], passes) for one in (busy, new))
    if now < then * (1 + PAYS) or (now - then) * left < REPAID * start:
        return None
    return cut, now, then


def busy_of(seconds: Sequence[float], axes: Axes) -> list[float]:
    """Of each stage, that of its slowest rank."""
    every = [0.0] * axes.count("pipeline")
    for rank, taken in enumerate(seconds):
        stage = axes.index(rank, "pipeline")
        every[stage] = max(every[stage], taken)
    return every


def stage_balance_of(
    settled: Settled, life: Life, model: Decoder, progress: Progress, begun: float
) -> StageBalance | None:
    """None where there are no stages, or they stay. `begun`: when this start began, by `perf_counter`."""
    if not isinstance(model.stage, Stage) or settled.config.parallel.balance != "measured":
        return None
    model.stage.watch = Stopwatch(model.embed.device)
    start = time.perf_counter() - begun
    return StageBalance(life, progress, settled.plan, model.stage.watch, settled.fits, start)


def _words(numbers: Sequence[float]) -> str:
    return " + ".join(f"{number:.3g}" for number in numbers)
