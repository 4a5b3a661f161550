"""The layouts of a run on a cluster, the fastest first: how long a step takes in each, and what the rank that
needs most needs. Where no layout fits, the least change of method or base that one fits with.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.largest import Largest
from glm_accelerate.memory.estimate import estimate
from glm_accelerate.memory.job import Job, matter
from glm_accelerate.memory.weights import WIDE, Weight, moments, weights_of
from glm_accelerate.models.sizes import Sizes
from glm_accelerate.plan.cost import GLOO, Speed
from glm_accelerate.plan.ground import Ground, Load
from glm_accelerate.plan.hardware import DataSheet, known
from glm_accelerate.plan.ladder import about
from glm_accelerate.plan.levers import BASE, METHOD, Option, Setting, conflict, levers
from glm_accelerate.plan.run_plan import LEAST_MICRO
from glm_accelerate.plan.step_time import (
    CARRIED,
    Fits,
    Machines,
    RankLayout,
    StepTime,
    Task,
    anything,
    step_time,
)
from glm_accelerate.plan.weigh import Weighed
from glm_accelerate.runtime.errors import UserError

NETWORK = 1.25e10  # bytes a second of a node's network where nobody says: 100 Gbit/s
MOST_STAGES = 32
ENOUGH = 32  # divisions that fit, of many devices: all that come later are slower
LEAST_PIECE = 4096  # tokens: documents are cut only where each of several ranks gets so many


@dataclass(frozen=True, slots=True)
class Cluster:
    """So many devices of one kind, in nodes alike."""

    device: DataSheet
    gpus: int
    nodes: int = 1
    network: float = NETWORK  # bytes a second of each node
    network_why: str = "assumed"
    measured: Speed | None = None  # of a processor

    def __post_init__(self) -> None:
        if self.gpus % self.nodes:
            raise UserError(
                f"{self.gpus} devices are not {self.nodes} equal nodes",
                cure="a multiple of --nodes in --gpus",
            )

    @property
    def machines(self) -> Machines:
        device = self.device
        assert device.products is not None
        assert device.bandwidth is not None
        links, one = (device.link, self.network, self.gpus // self.nodes), self.measured
        if one is not None:
            return Machines(one.products, 1.0, one.bandwidth, *links, one.started, one.head, measured=True)
        return Machines(device.products, device.reached, device.bandwidth, *links)


@dataclass(frozen=True, slots=True)
class WeighedLayout:
    """A layout, and what it comes to."""

    layout: RankLayout
    time: StepTime
    needed: int  # bytes of the rank that needs most
    room: int

    @property
    def fits(self) -> bool:
        return self.needed <= self.room


@dataclass(frozen=True, slots=True)
class LayoutComparison:
    """The layouts of one setting, the fastest first; of each division of the ranks the best that fits."""

    cluster: Cluster
    overrides: tuple[str, ...]  # what was changed so that any fits
    tokens: float  # of a step
    flops: float
    state: int  # bytes of weights, gradients and moments of all ranks together, where each is there once
    fitting: tuple[WeighedLayout, ...]
    too_large: tuple[WeighedLayout, ...]
    alone: WeighedLayout  # data parallel, and no more
    own: WeighedLayout  # as the config has it now
    refused: tuple[str, ...]  # what did not come into question, and why

    def per_second(self, one: WeighedLayout) -> float:
        """Tokens of all devices together."""
        return self.tokens / one.time.seconds

    def utilisation(self, one: WeighedLayout) -> float:
        """What the mathematics needs of what the devices could (MFU)."""
        possible = self.cluster.machines.products * one.layout.ranks
        return self.flops / one.time.seconds / possible


class _Search:
    """The layouts of one setting on a cluster."""

    def __init__(self, config: RunConfig, setting: Setting, load: Load, cluster: Cluster, room: int) -> None:
        self.config, self.setting, self.load = config, setting, load
        self.cluster, self.room = cluster, room
        self.job, self.work = replace(setting.job, tensor=1, shards=1, stages=()), load.work()
        self.refused: dict[str, None] = {}
        steps = load.order.epoch(0)
        self.samples = sum(map(len, steps)) / len(steps)  # of a step
        estimated = cache(estimate)
        self._about, self.timed = cache(lambda job: about(job, estimated)), cache(self._timed)
        self._padding, self._largest, self.weigh = cache(self._padded), cache(self._found), cache(self._weigh)

    def task(self, padding: float = 1.0) -> Task:
        """A mean step."""
        each = padding / self.work.steps
        return Task(self.job, self.work.tokens * each, self.work.pairs * each, self.work.targets * each)

    def sharing(self, context: int) -> Load:
        """Where so many ranks share a long document."""
        return replace(self.load, context=context)

    def _padded(self, micro_tokens: int, ranks: int, context: int) -> float:
        return self.sharing(context).padding(self.setting.batching, micro_tokens, ranks)

    def _found(self, micro_tokens: int, ranks: int, context: int, matter: int) -> Largest:
        return self.sharing(context).largest(self.setting.batching, micro_tokens, ranks, matter)

    def _timed(self, layout: RankLayout, fits: Fits = anything) -> StepTime:
        """Ranks wait for the one with the most, so all compute as much."""
        ranks = layout.samplers * layout.context
        task = self.task(self._padding(layout.micro_tokens, ranks, layout.context))
        return step_time(task, layout, self.cluster.machines, fits=fits)

    def _weigh(self, layout: RankLayout) -> WeighedLayout:
        time = self.timed(layout)
        return WeighedLayout(layout, time, self._bytes(layout, time.stages), self.room)

    def divisions(self) -> Iterator[RankLayout]:
        """Every way to divide the ranks that the model allows."""
        gpus, together, sizes = self.cluster.gpus, self.cluster.machines.together, self.job.sizes
        for tensor, context, pipeline in product(_divisors(together), _divisors(gpus), _divisors(gpus)):
            samplers, rest = divmod(gpus, tensor * context * pipeline)
            long = context == 1 or self.sharing(1).longest >= context * LEAST_PIECE
            alone = tensor == context == pipeline == 1
            if rest or not long or pipeline > min(sizes.layers if sizes.plain else 1, MOST_STAGES):
                continue
            if samplers * context > self.samples and not alone:
                continue
            try:
                sizes.part(tensor)
            except ValueError:
                continue
            near = max(1, together // (tensor * context))  # in a node
            asked = self.config.parallel.shard
            some = asked // context if isinstance(asked, int) else 1
            shards = {1, samplers, *(size for size in (near, some) if size and samplers % size == 0)}
            for shard in sorted(shards):
                yield RankLayout(pipeline, samplers // shard, shard, context, tensor)

    def variants(self, division: RankLayout) -> Iterator[RankLayout]:
        """By the size of passes, with and without recomputation, as the config leaves open."""
        longest = self.sharing(division.context).longest
        size = max(self.setting.micro_tokens, longest)
        sizes, least = [size], max(longest, 8 * LEAST_MICRO)
        while self.config.train.micro_tokens == "auto" and size > least:
            size = max(least, size // 2 // LEAST_MICRO * LEAST_MICRO)
            sizes.append(size)
        asked = self.config.memory.recompute
        again = (0.0, 1.0) if asked == "auto" else (float(asked != "off"),)
        for micro_tokens, recompute in product(sizes, again):
            yield replace(division, micro_tokens=micro_tokens, recompute=recompute)

    def all(self) -> list[RankLayout]:
        """Every variant of every division that can be, the fastest first."""
        found: list[RankLayout] = []
        for division in self.divisions():
            refusal = conflict(self._job(division, (1,) * division.pipeline), self.config.optim.clip)
            if refusal is not None:
                self.refused[str(refusal)] = None
            else:
                found += self.variants(division)
        return sorted(found, key=lambda one: self.timed(one).seconds)

    def fitting(self, every: Sequence[RankLayout]) -> list[WeighedLayout]:
        """Of enough divisions the fastest variant that fits; those that come later are slower."""
        found: dict[RankLayout, WeighedLayout] = {}
        for layout in every:
            division = _division(layout)
            if division in found and found[division].time.seconds <= self.timed(layout).seconds:
                continue
            one = self.weigh(layout)
            one = one if one.fits else self.recut(one)
            if one is not None and (division not in found or one.time.seconds < found[division].time.seconds):
                found[division] = self.spared(one)
            if len(found) >= ENOUGH:
                break
        return sorted(found.values(), key=lambda one: one.time.seconds)

    def too_large(self, every: Sequence[RankLayout], fitting: Sequence[WeighedLayout]) -> list[WeighedLayout]:
        """Divisions of which nothing fits, at their smallest, as far as they would be the fastest."""
        there = {_division(one.layout) for one in fitting}
        least: dict[RankLayout, RankLayout] = {}
        for layout in every:
            if not fitting or self.timed(layout).seconds < fitting[0].time.seconds:
                key = (layout.recompute, -layout.micro_tokens)
                now = least.setdefault(_division(layout), layout)
                if key > (now.recompute, -now.micro_tokens):
                    least[_division(layout)] = layout
        few = [layout for division, layout in least.items() if division not in there]
        return [one for one in map(self.weigh, few[: None if not fitting else ENOUGH]) if not one.fits]

    def recut(self, found: WeighedLayout) -> WeighedLayout | None:
        """With stages that fit, if any do: those with much besides layers have fewer of them."""
        count = found.layout.pipeline
        job = self._job(found.layout, found.time.stages)
        own = [self._about(one) for one in job.of_stages()]
        if count == 1 or sum(own) > count * self.room:
            return None

        def fits(stage: int, start: int, stop: int) -> bool:
            return self._about(job.of_stage(stage, count, start, stop)) <= self.room

        try:
            time = self._timed(found.layout, fits)
        except ValueError:
            return None
        return replace(found, time=time, needed=self._bytes(found.layout, time.stages))

    def spared(self, found: WeighedLayout) -> WeighedLayout:
        """With no more recomputation than it must, where the plan can choose that: in whole models."""
        layout = found.layout
        if not layout.recompute or layout.data < layout.ranks or self.config.memory.recompute != "auto":
            return found
        most = self.weigh(replace(layout, recompute=0.0)).needed
        part = (most - self.room) / (most - found.needed)
        layout = replace(layout, recompute=max(0.0, min(1.0, part)))
        return replace(found, layout=layout, time=self.timed(layout), needed=min(most, self.room))

    def asked(self, layout: RankLayout) -> bool:
        """Whether the config leaves it open."""
        parallel, divided = self.config.parallel, divided_over(layout)
        words = {"auto": divided, "off": 1, "full": layout.samplers * layout.context}
        axes = (axis for axis in ("tensor", "pipeline", "context") if axis not in parallel.open)
        same = all(parallel.size(axis) == layout.size(axis) for axis in axes)
        return same and words.get(str(parallel.shard), parallel.shard) == divided

    def compare(self, own: RankLayout, overrides: tuple[str, ...] = ()) -> LayoutComparison:
        """The fastest divisions, each at its best, beside data parallel alone."""
        every, task = self.all(), self.task()
        fitting = self.fitting(every)
        large = self.too_large(every, fitting)
        plain = [one for one in every if one.samplers == self.cluster.gpus]
        shards = [
            [one for one in plain if one.shard == size] for size in sorted({one.shard for one in plain})
        ]
        alone = [self.fitting(some) or [self.weigh(some[-1])] for some in shards]
        best = min(
            (found[0] for found in alone),
            key=lambda one: (not one.fits, one.time.seconds * one.fits, one.needed),
        )
        return LayoutComparison(
            cluster=self.cluster,
            overrides=overrides,
            tokens=task.tokens,
            flops=task.flops,
            state=sum(_kept_bytes(self.job, weight) for weight in weights_of(self.job)),
            fitting=tuple(fitting),
            too_large=tuple(large),
            alone=best,
            own=self.weigh(own),
            refused=tuple(self.refused),
        )

    def _job(self, layout: RankLayout, stages: Sequence[int]) -> Job:
        """Of its ranks: the largest passes of the run."""
        ranks, shards = layout.samplers * layout.context, layout.shard * layout.context
        found = self._largest(layout.micro_tokens, ranks, layout.context, matter(layout.pipeline))
        return replace(
            self.job,
            sizes=self.job.sizes.part(layout.tensor),
            tensor=layout.tensor,
            context=layout.context,
            ranks=ranks,
            shards=shards if layout.shard > 1 else 1,
            stages=tuple(stages) if layout.pipeline > 1 else (),
            recompute="blocks" if layout.recompute else "off",
            pass_tokens=found.positions,
            longest=found.longest,
            learnt=found.targets,
            gathered=found.gathered,
            passes=found.count,
        )

    def _bytes(self, layout: RankLayout, stages: Sequence[int]) -> int:
        """Of the rank that needs most, of stages of so many layers."""
        of_stages = self._job(layout, stages).of_stages()
        return max(round(self._about(one)) for one in of_stages)


def cluster_of(ground: Ground, speed: Speed | None) -> Cluster | None:
    """The devices of a run, if enough is known of them: as data sheets have them, processors as measured."""
    hardware, told = ground.hardware, "assumed" if ground.network is None else "--link"
    device, measured = known(hardware.name), None
    if hardware.device == "cpu" and speed is not None:
        bytes_, link, measured = hardware.memory_bytes, GLOO / CARRIED, speed
        device = DataSheet(hardware.name, "cpu", bytes_, speed.products, speed.bandwidth, link, "gloo", 1.0)
    if device is None or device.products is None:
        return None
    return Cluster(device, ground.ranks, ground.nodes, ground.network or NETWORK, told, measured)


def chosen_layouts(config: RunConfig, ground: Ground, weighed: Weighed) -> list[WeighedLayout]:
    """Those of a run's ranks that fit, of all that its config leaves open, the fastest first; none where
    nothing is known of its devices. `weighed`: with 1 for each size that is open.
    """
    cluster = cluster_of(ground, weighed.speed)
    if cluster is None:
        return []
    setting = replace(weighed.setting, job=replace(weighed.setting.job, sizes=ground.sizes))
    search = _Search(config, setting, weighed.ladder.load, cluster, weighed.memory.room)
    return search.fitting([one for one in search.all() if search.asked(one)])


def divided_over(layout: RankLayout) -> int:
    """How many ranks share one copy of the state: of a context, too."""
    return layout.shard * layout.context if layout.shard > 1 else 1


def _kept_bytes(job: Job, weight: Weight) -> int:
    """A rank's part of a weight, of its gradient and moments."""
    state = moments(job.optimizer, weight, job.shards) + WIDE * weight.part(job.shards)
    return weight.bytes(job.shards) + state * weight.trains


def compare_layouts(config: RunConfig, weighed: Weighed, sizes: Sizes, cluster: Cluster) -> LayoutComparison:
    """Of a run as its plan has it, with the whole model's sizes; if no layout fits, of the least change of
    method or base that one fits with.
    """
    job, load, room = weighed.found.setting.job, weighed.ladder.load, weighed.memory.room
    own = RankLayout(
        pipeline=max(1, len(job.stages)),
        data=job.ranks // max(job.shards, job.context),
        shard=max(1, job.shards // job.context),
        context=job.context,
        tensor=job.tensor,
        micro_tokens=weighed.found.setting.micro_tokens,
        recompute=float(job.recompute != "off"),
    )
    setting = replace(weighed.setting, job=replace(weighed.setting.job, sizes=sizes))
    found = _Search(config, setting, load, cluster, room).compare(own)
    if found.fitting:
        return found
    for options in _changes(config, setting, load.longest):
        changed = setting
        for option in options:
            changed = option.apply(changed)
        typed = tuple(word for option in options for word in option.typed)
        other = _Search(config, changed, load, cluster, room).compare(own, typed)
        if other.fitting:
            return replace(other, too_large=found.too_large, own=found.own, state=found.state)
    return found


def _changes(config: RunConfig, setting: Setting, longest: int) -> Iterator[tuple[Option, ...]]:
    """LoRA in place of full, then its base in fewer bits."""
    every = [option for lever in levers(config, setting, longest) for option in lever]
    methods = [option for option in every if option.tier == METHOD and option.typed]
    bases = [option for option in every if option.tier == BASE and option.typed]
    yield from ((method,) for method in methods)
    yield from ((*methods, base) for base in bases)


def _division(layout: RankLayout) -> RankLayout:
    return replace(layout, micro_tokens=0, recompute=0.0)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
