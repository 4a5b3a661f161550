"""How fast each rank computes, measured as a run goes. A rank that is slow is named; where the config says so
(`parallel.balance=measured`) the same samples are dealt by it. Shares change only as a checkpoint is saved,
which holds them: whatever a resumed run does again, it deals as before.
"""

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from statistics import median_low

from glm_accelerate.data.pack import BY_TOKENS, Dealing
from glm_accelerate.data.types import DOCUMENT_ALIGNMENT, Step
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.parallel.place import SAMPLES, Axes
from glm_accelerate.plan.dealing import dealing_of
from glm_accelerate.plan.run_plan import RunPlan
from glm_accelerate.runtime.device import Stopwatch
from glm_accelerate.runtime.env import node_name
from glm_accelerate.training.life import Life
from glm_accelerate.training.pass_cost import PassCost, of_all, timed
from glm_accelerate.training.settle import Settled
from glm_accelerate.training.state import Progress

LOOK, WINDOW, FEWEST = 10, 20, 5  # steps between two looks, in one at the most, in one at least
ENOUGH = 0.5  # seconds of computing in a look, below which it says nothing
SLOW, NO_LONGER = 1.5, 1.25  # times the median of a rank that is named, until it is below the latter
PAYS = 0.1  # of the best step's time that shares have to lose before they change
CHANGED = 0.3  # of the longest sample's cost, by which a new factor has to change it
LEAST = 0.2  # of the fastest rank's share, however slow another is


def watched(model: Decoder) -> Stopwatch:
    """It runs while blocks compute forward in training, without what FSDP gathers before them."""
    watch = Stopwatch(model.embed.device)
    for block in model.layers:
        block.register_forward_pre_hook(lambda block, inputs: watch.go() if block.training else None)
        block.register_forward_hook(lambda block, inputs, output: watch.stop(), prepend=True)
    return watch


@dataclass(slots=True)
class Balance:
    """One rank's part in it. All ranks call the same methods at the same steps."""

    life: Life
    progress: Progress
    model: Decoder
    plan: RunPlan
    longest: int  # tokens of a sample
    watch: Stopwatch
    forward: PassCost  # what its times are compared with
    _first: int = field(init=False)  # the step that sets up
    _seen: deque[tuple[float, float]] = field(
        default_factory=lambda: deque[tuple[float, float]](maxlen=WINDOW)
    )
    _slow: dict[int, int] = field(default_factory=dict[int, int])  # since which step a rank is

    def __post_init__(self) -> None:
        self._first = self.progress.position + 1

    def after(self, step: Step) -> None:
        """Note what a step took, and now and then name ranks that are slow."""
        seconds, cost = self.watch.read(), sum(map(self.forward.of, step.batches))
        if step.number > self._first:
            self._seen.append((seconds, cost))
        if step.number % LOOK == 0:
            self._name(step.number)

    def at_save(self) -> None:
        """Deal in another way from here on, if it pays. The checkpoint holds what is decided."""
        now = self.progress.dealing
        if now is None or not now.moves or self.progress.position == self.plan.steps:
            return
        slow, cost = self._slowness(), timed(self.model, self.plan, self.life.place)
        new = chosen(now, slow, None if cost is None else cost[1].square, self.longest, self.life.place.axes)
        if new == now:
            return
        self.progress.dealing = new
        self.say(f" (before: {_words(now)})")

    def say(self, more: str = "") -> None:
        """How samples are dealt, where that was measured."""
        dealing = self.progress.dealing
        if dealing is None or not dealing.moves:
            return
        said = f"shares of a step, as measured: {_words(dealing)}{more}"
        fields = {"step": self.progress.position, "shares": dealing.speeds, "square": dealing.square}
        self.life.events.emit("decision", {**fields, "said": said})

    def _slowness(self) -> list[float] | None:
        """Of each rank; None where too little was seen to tell."""
        if len(self._seen) < FEWEST:
            return None
        seconds, cost = (sum(each) for each in zip(*self._seen, strict=True))
        every = of_all(self.life.place, seconds, cost)
        if median_low(each[0] for each in every) < ENOUGH:
            return None
        return slowness([taken / of for taken, of in every], self.life.place.axes)

    def _name(self, step: int) -> None:
        slow = self._slowness()
        if slow is None:
            return
        begun = [rank for rank, times in enumerate(slow) if times > SLOW and rank not in self._slow]
        ended = [rank for rank in self._slow if slow[rank] < NO_LONGER]
        if not begun and not ended:
            return
        ranks, since = self.life.ranks, step - len(self._seen) + 1
        nodes = ranks.nodes or (node_name(),) * ranks.count
        for rank in begun:
            self._slow[rank] = since
            said = f"rank {rank} ({nodes[rank]}) computes {slow[rank]:.1f} times as slowly as the median"
            fields = {"step": step, "rank": rank, "node": nodes[rank], "times": slow[rank], "since": since}
            self.life.events.emit("warning", {**fields, "said": f"{said}, since step {since}"})
        for rank in ended:
            was = self._slow.pop(rank)
            said = f"rank {rank} ({nodes[rank]}) is no longer slow, as it was since step {was}"
            self.life.events.emit("decision", {"step": step, "rank": rank, "said": said})


def slowness(units: Sequence[float], axes: Axes) -> list[float]:
    """Of each rank, times the median of those that do the same work on different samples. `units`: seconds
    that each takes for the same cost.
    """
    slow = [1.0] * len(units)
    for group in axes.groups(*SAMPLES):
        usual = median_low(units[rank] for rank in group)
        for rank in group:
            slow[rank] = units[rank] / usual
    return slow


def shares_of(slow: Sequence[float], axes: Axes) -> list[float]:
    """How slow each share of the samples is computed: as the slowest of its ranks, or of the neighbours that
    share long documents with them.
    """
    every = [0.0] * axes.count(*SAMPLES)
    for rank, times in enumerate(slow):
        first = axes.index(rank, *SAMPLES) // axes.context * axes.context
        for share in range(first, first + axes.context):
            every[share] = max(every[share], times)
    return every


def chosen(
    now: Dealing, slow: Sequence[float] | None, square: float | None, longest: int, axes: Axes
) -> Dealing:
    """How to deal from here on: as before, unless another way is clearly better by what was measured."""
    new = now
    if square is not None and abs(square - now.square) * longest > CHANGED * (1 + now.square * longest):
        new = replace(new, square=float(f"{square:.2g}"))
    if slow is None:
        return new
    times = shares_of(slow, axes)
    have = now.speeds or (1.0,) * len(times)
    taken = max(speed * each for speed, each in zip(have, times, strict=True)) / sum(have)
    if taken * sum(1 / each for each in times) < 1 + PAYS:
        return new
    speeds = tuple(max(LEAST, round(min(times) / each, 2)) for each in times)
    return replace(new, speeds=speeds)


def balance_of(settled: Settled, life: Life, model: Decoder, progress: Progress) -> Balance | None:
    """None where no ranks take different samples. From here on `progress` says how they are dealt."""
    place, plan = life.place, settled.plan
    ranks = place.samples[1]
    if ranks == 1:
        return None
    asked, kept = dealing_of(settled.config, model.sizes), progress.dealing
    longest = int(settled.inputs.train.lengths.max())
    forward = PassCost(DOCUMENT_ALIGNMENT, asked.square)
    if asked.moves and (costs := timed(model, plan, place)) is not None:
        forward, both = costs
        asked = chosen(asked, None, both.square, longest, place.axes)
    if asked != BY_TOKENS:
        asked = replace(asked, together=plan.shards > 1)
    if asked != BY_TOKENS and kept is not None:
        speeds = kept.speeds if asked.moves and len(kept.speeds) == ranks else ()
        together = asked.together and kept.square > 0  # not in runs from before there was a choice
        asked = replace(kept, speeds=speeds, together=together, moves=asked.moves)
    progress.dealing = asked
    balance = Balance(life, progress, model, plan, longest, watched(model), forward)
    balance.say()
    return balance


def dealt_steps(settled: Settled, life: Life, progress: Progress) -> Generator[Step, None, None]:
    """The steps that are left, dealt as `progress` says at each."""
    while progress.position < settled.plan.steps:
        dealing = progress.dealing
        with closing(settled.steps(progress.position, life.place, dealing or BY_TOKENS)) as steps:
            for step in steps:
                yield step
                if progress.dealing != dealing:
                    break


def _words(dealing: Dealing) -> str:
    speeds = ", ".join(f"{speed:g}" for speed in dealing.speeds) or "equal"
    return f"{speeds}, n tokens cost n + {dealing.square:g} n²"
