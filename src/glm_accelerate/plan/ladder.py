"""The cheapest change that makes a run fit: in the lowest tier that suffices, of all combinations that do and
of which nothing can be spared, the one that takes the least time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import inf

from glm_accelerate.memory.estimate import Estimate, estimate
from glm_accelerate.memory.job import Job, matter
from glm_accelerate.plan.cost import Speed, run_seconds
from glm_accelerate.plan.ground import Load
from glm_accelerate.plan.levers import (
    DEVICES,
    ITSELF,
    OFFLOAD,
    ROUNDING,
    Lever,
    Option,
    Setting,
    possible,
    up_to,
)

ALIKE = 0.01  # of bytes: a smaller difference is none
FEW = 2  # layers of the models from which a deep one's memory is judged, before it is estimated
ROUNDS = 2  # through all levers, each at its least beside the others, until nothing moves


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run with one option of each lever."""

    options: tuple[Option, ...]
    setting: Setting  # its job complete
    seconds: float
    estimate: Estimate

    @property
    def needed(self) -> int:
        return needed(self.setting.job, self.estimate)

    @property
    def typed(self) -> tuple[str, ...]:
        return tuple(text for option in self.options for text in option.typed)


class Ladder:
    """Judges the settings of one run, and remembers what it found. `room`: bytes of a device that may be
    used; `micro_tokens`: of passes by which padding is judged.
    """

    def __init__(self, load: Load, speed: Speed, room: int, micro_tokens: int) -> None:
        self.load, self.work, self.speed, self.room = load, load.work(), speed, room
        self._loads = cache(lambda context: replace(load, context=context))
        self._largest = cache(lambda context, *told: self._loads(context).largest(*told))
        self._padding = cache(lambda context, *told: self._loads(context).padding(*told))
        self._micro_tokens, self._estimate = micro_tokens, cache(estimate)

    def cheapest(self, setting: Setting, levers: Sequence[Lever], most: int = DEVICES) -> PlannedRun | None:
        """What fits in the lowest tier up to `most`; None if nothing does."""
        for tier in range(most + 1):
            within = [up_to(lever, tier) for lever in levers]
            if self._about(setting, self._least(setting, within)) <= self.room * (1 + ALIKE):
                fitting = list(self._irreducible(setting, within, tier))
                if fitting:
                    return min(fitting, key=lambda found: found.seconds)
        return None

    def least(self, setting: Setting, levers: Sequence[Lever]) -> PlannedRun:
        """What needs the least memory, whether that fits or not."""
        return self.judge(setting, self._least(setting, levers))

    def _least(self, setting: Setting, levers: Sequence[Lever]) -> tuple[Option, ...]:
        """Each lever in turn at its least beside the others; of those alike the one that goes furthest."""
        chosen = tuple(lever[0] for lever in levers)
        for place, lever in list(enumerate(levers)) * ROUNDS:
            tried = [(*chosen[:place], option, *chosen[place + 1 :]) for option in reversed(lever)]
            about = {options: self._about(setting, options) for options in tried}
            chosen = min(tried, key=lambda options: about[options])
        return chosen

    def rungs(self, setting: Setting, levers: Sequence[Lever]) -> Iterator[tuple[Option, PlannedRun]]:
        """Each typed option on top of those above it, and beside it what the plan does by itself; those that
        save next to nothing there are left out. More devices stand in place of the host's memory.
        """
        own = [up_to(lever, ITSELF) for lever in levers]
        climbed = own
        below = self._about(setting, self._least(setting, climbed))
        for place, lever in enumerate(levers):
            before = climbed, below
            if lever[-1].tier == DEVICES:  # what rounds an update is for whole weights
                rounds = [other[-1].tier == ROUNDING for other in levers]
                climbed = [one if r else other for one, other, r in zip(own, climbed, rounds, strict=True)]
            for option in lever:
                tried = [*climbed[:place], (option,), *climbed[place + 1 :]]
                if not option.typed or not possible(self._complete(setting, [one[0] for one in tried])):
                    continue
                least = self._least(setting, tried)
                about = self._about(setting, least)
                if about < below * (1 - ALIKE):
                    yield option, self.judge(setting, least)
                    climbed, below = tried, about
            if lever[-1].tier == OFFLOAD:
                climbed, below = before

    def judge(self, setting: Setting, options: Sequence[Option]) -> PlannedRun:
        """The setting under all of these."""
        complete = self._complete(setting, options)
        return PlannedRun(tuple(options), complete, self._seconds(complete), self._estimate(complete.job))

    def _irreducible(self, setting: Setting, levers: Sequence[Lever], tier: int) -> Iterator[PlannedRun]:
        """Every set of typed options that suffices and would not without any one of them, each beside what
        the plan does by itself where that is fastest.
        """
        own = [up_to(lever, ITSELF) for lever in levers]
        enough: list[set[Option]] = []
        typed_of_each = [[None, *(option for option in lever if option.typed)] for lever in levers]
        for combination in sorted(product(*typed_of_each), key=lambda options: sum(map(bool, options))):
            typed = {option for option in combination if option is not None}
            highest = max((option.tier for option in typed), default=0)
            if highest < tier or any(other <= typed for other in enough):
                continue
            pairs = zip(own, combination, strict=True)
            within = [lever if option is None else (option,) for lever, option in pairs]
            found = self._fastest(setting, within)
            if found is not None:
                enough.append(typed)
                yield found

    def _fastest(self, setting: Setting, levers: Sequence[Lever]) -> PlannedRun | None:
        every = [options for options in product(*levers) if possible(self._complete(setting, options))]
        for options in sorted(every, key=lambda options: self._seconds(self._complete(setting, options))):
            if self._about(setting, options) <= self.room * (1 + ALIKE):
                found = self.judge(setting, options)
                if found.needed <= self.room:
                    return found
        return None

    def _complete(self, setting: Setting, options: Sequence[Option]) -> Setting:
        """Under these options, with its passes laid out."""
        for option in options:
            setting = option.apply(setting)
        ranks, context = setting.job.ranks, setting.job.context
        passes = matter(len(setting.job.stages))
        found = self._largest(context, setting.batching, setting.micro_tokens, ranks, passes)
        job = replace(
            setting.job,
            pass_tokens=found.positions,
            longest=found.longest,
            learnt=found.targets,
            gathered=found.gathered,
            passes=found.count,
        )
        return replace(setting, job=job)

    def _seconds(self, setting: Setting) -> float:
        padding = self._padding(setting.job.context, setting.batching, self._micro_tokens, setting.job.ranks)
        return run_seconds(setting.job, self.work, self.speed, padding)

    def _about(self, setting: Setting, options: Sequence[Option]) -> float:
        """Bytes needed, of the stage that needs most."""
        setting = self._complete(setting, options)
        if not possible(setting):
            return inf
        return max(about(job, self._estimate) for job in setting.job.of_stages())


def about(job: Job, estimated: Callable[[Job], Estimate] = estimate) -> float:
    """Bytes needed, from two models of few layers: what memory adds a layer is the same for each."""
    layers, few = job.sizes.layers, FEW + (job.last if job.method == "freeze" else 0)
    if layers <= 2 * few:
        return needed(job, estimated(job))
    shallow, deep = (replace(job, sizes=replace(job.sizes, layers=few + more)) for more in (0, FEW))
    least, more = (needed(one, estimated(one)) for one in (shallow, deep))
    return least + (more - least) / FEW * (layers - few)


def needed(job: Job, found: Estimate) -> int:
    """Bytes of the device; on a CPU of the host, whose memory that is, but for what saving does without where
    memory is short (training/saver.py).
    """
    return found.peak + (found.host - found.spared if job.device == "cpu" else 0)
