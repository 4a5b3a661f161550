"""A pipeline as arithmetic: which layers make a stage, in which order a stage runs its passes, and how
long that takes. The trainer follows the order, the plan adds up its time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from glm_accelerate.memory.job import in_flight


class StagePass(NamedTuple):
    """A pass of a step, by number, through the layers of one stage."""

    way: Literal["forward", "backward"]
    number: int


def one_forward_one_backward(stage: int, stages: int, passes: int) -> list[StagePass]:
    """The order in which a stage runs a step's passes. The later the stage, the fewer of them it holds
    between forward and backward: `in_flight`.
    """
    ahead = in_flight(stage, stages, passes) - 1
    order = [StagePass("forward", number) for number in range(min(ahead, passes))]
    for number in range(passes):
        if number + ahead < passes:
            order.append(StagePass("forward", number + ahead))
        order.append(StagePass("backward", number))
    return order


def piped_seconds(stages: Sequence[float], passes: int, edge: float = 0.0) -> float:
    """How long a step takes whose stages need so long for a pass, forward and backward together."""
    return seconds_of([each / 3 for each in stages], [each * 2 / 3 for each in stages], passes, edge)


def idle(stages: Sequence[float], passes: int) -> float:
    """The share of a step in which a stage waits for another, on average."""
    return 1 - passes * sum(stages) / len(stages) / piped_seconds(stages, passes)


def seconds_of(forward: Sequence[float], backward: Sequence[float], passes: int, edge: float = 0.0) -> float:
    """How long a step takes whose stages need so long for a pass; `edge`: from one stage to the next."""
    stages = len(forward)
    orders = [one_forward_one_backward(stage, stages, passes) for stage in range(stages)]
    ended: dict[tuple[int, StagePass], float] = {}
    free, done = [0.0] * stages, [0] * stages
    while any(done[stage] < len(orders[stage]) for stage in range(stages)):
        for stage, order in enumerate(orders):
            while done[stage] < len(order):
                run = order[done[stage]]
                before = stage - 1 if run.way == "forward" else stage + 1
                if 0 <= before < stages and (before, run) not in ended:
                    break
                arrived = ended[before, run] + edge if 0 <= before < stages else 0.0
                taken = (forward if run.way == "forward" else backward)[stage]
                ended[stage, run] = free[stage] = max(free[stage], arrived) + taken
                done[stage] += 1
    return max(free)


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Seconds, or in proportion to them: of each layer, and of what the first and last stage do besides."""

    layers: tuple[float, ...]
    first: float = 0.0  # the embedding
    last: float = 0.0  # norm, head and loss

    def of(self, start: int, stop: int) -> float:
        """Of a stage of these layers."""
        ends = (self.first if start == 0 else 0.0) + (self.last if stop == len(self.layers) else 0.0)
        return sum(self.layers[start:stop]) + ends

    def of_stages(self, sizes: Sequence[int]) -> list[float]:
        """Of stages of so many layers each."""
        return [self.of(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]


def cut_stages(
    costs: LayerCosts,
    stages: int,
    fits: Callable[[int, int, int], bool] = lambda stage, start, stop: True,
    slow: Sequence[float] = (),
) -> tuple[int, ...] | None:
    """How many layers each stage has, so that the slowest is as fast as possible; each has one at least.
    `fits(stage, start, stop)`: whether a stage has the memory for these. None: no cut does. `slow`: times
    these costs that each stage needs, if they differ.
    """
    count = len(costs.layers)
    # Of the best cut of the first layers into the stages so far, by where it ends: its slowest stage, sizes.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(stages):
        reached: dict[int, tuple[float, tuple[int, ...]]] = {}
        times = slow[stage] if slow else 1.0
        for start, (slowest, sizes) in best.items():
            for stop in range(start + 1, count + 1):
                last = stage == stages - 1
                if last != (stop == count) or not fits(stage, start, stop):
                    continue
                candidate = max(slowest, times * costs.of(start, stop)), (*sizes, stop - start)
                if stop not in reached or candidate < reached[stop]:
                    reached[stop] = candidate
        best = reached
    return best[count][1] if count in best else None
