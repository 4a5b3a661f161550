"""How long a step takes on many devices, by how they share it: products at the speed that devices reach, what
is read and written besides, what travels over each link, and the time in which stages have nothing to do.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, prod

from glm_accelerate.memory.job import Job
from glm_accelerate.memory.weights import PACKED, sent_size
from glm_accelerate.models.shapes import shapes_of
from glm_accelerate.plan.cost import (
    KEPT,
    MOVED,
    UNPACKED,
    Trained,
    attended_flops,
    product_flops,
    trained_weights,
)
from glm_accelerate.plan.schedule import LayerCosts, cut_stages, seconds_of

# What is reached of a data sheet's figures, as is `reached` of its products in plan/hardware.py: all that is
# neither counted nor on a data sheet (docs/why/time-model.md).
ATTENDING = 0.6  # of the speed of products, in attention
BANDWIDTH = 0.8  # of a device's memory
CARRIED = 0.75  # of a link
STARTED = 4e-4  # seconds in which a host starts a block's kernels, forward and backward

ACTIVATION = 2  # bytes
LOGIT = 12  # bytes that are read and written for a logit and its gradient
SETTLED = 4  # times as many passes as stages: from there on each takes what the slowest stage takes
AXES = ("pipeline", "data", "shard", "context", "tensor")  # to count with, innermost last
Fits = Callable[[int, int, int], bool]  # of a stage, and the first and the last but one of its layers


@dataclass(frozen=True, slots=True)
class RankLayout:
    """How ranks share a step. Those along `data` and `shard` take different samples; `context` ranks are not
    counted among them here, as they are in parallel/place.py.
    """

    pipeline: int = 1
    data: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    micro_tokens: int = 2048  # of a pass on one rank
    recompute: float = 0.0  # part of the forward pass that is computed again
    chunks: int = 1  # parts of the model that a stage has, in other trainers' published runs; ours has 1

    @property
    def ranks(self) -> int:
        return prod(self.size(axis) for axis in AXES)

    @property
    def samplers(self) -> int:
        return self.data * self.shard

    def size(self, axis: str) -> int:
        return getattr(self, axis)

    def group(self, axis: str) -> tuple[int, int]:
        """How many ranks exchange something along it, and how far apart neighbours are. What is divided is
        divided over the ranks of a context, too, and whole copies sum over them.
        """
        inner = prod(self.size(name) for name in AXES[AXES.index(axis) + 1 :])
        divided = self.shard > 1
        if axis == ("shard" if divided else "data"):
            return self.size(axis) * self.context, inner // self.context
        return self.size(axis), inner


@dataclass(frozen=True, slots=True)
class Task:
    """A step of a run: what all ranks compute together."""

    job: Job  # of one process, with the whole model
    tokens: float
    pairs: float  # of tokens, one of which sees the other
    targets: float

    @property
    def trained(self) -> Trained:
        prefix = self.job.prefix_tokens if self.job.method == "prefix" else 0
        return Trained(self.job.method, self.job.last, prefix)

    @property
    def flops(self) -> float:
        """What the mathematics needs."""
        products = product_flops(self.job.sizes, self.trained, self.tokens, self.targets)
        return products + attended_flops(self.job.sizes, self.trained, self.pairs)


@dataclass(frozen=True, slots=True)
class Machines:
    """Devices of one kind and their links; bytes a second one way."""

    products: float  # a second, by the data sheet
    reached: float  # part of them
    bandwidth: float
    inside: float  # of a device to others of its node
    network: float  # of a node to others, for all its devices
    together: int  # devices of a node
    started: float = STARTED  # seconds of a block, forward and backward, that do not depend on its tokens
    head: float | None = None  # products a second of the head and its loss, where they were measured
    measured: bool = False  # processors: all that blocks do is in their products, and to send is work, too

    def carry(self, size: float, group: int, stride: int) -> tuple[bool, float]:
        """Whether it leaves the node, and how long it takes until each of a group has these bytes of all."""
        here = max(1, min(group, self.together // stride))
        nodes = ceil(group / here)
        inside = size * (group - 1) / group / self.inside if here > 1 else 0.0
        outside = size * (1 - 1 / nodes) / (self.network * here / self.together)  # as many groups share it
        return nodes > 1, max(inside, outside) / CARRIED


@dataclass(frozen=True, slots=True)
class Software:
    """What a trainer's operators read, write and send; as it stands, ours."""

    elementwise: float = 1.0  # times what fused operators between products read and write
    scores: float = 0.0  # ... forward for each pair of tokens and head, where they are kept
    parted_norms: bool = False  # ranks that share products have parts of what norms read, too
    gathered: float = 0.0  # bytes of a weight as it travels; 0: as the job keeps it
    summed: float = 4.0  # ... and of its gradient


OURS = Software(parted_norms=True)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a rank gets along an axis in a step: over which link, how long it takes, and waits for it."""

    axis: str
    network: bool  # it leaves the node
    bytes: float
    seconds: float
    waited: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step, and what it consists of."""

    seconds: float
    computing: float  # of the slowest stage
    bubble: float  # in which it has nothing to do
    update: float
    traffic: tuple[Traffic, ...]
    stages: tuple[int, ...]  # layers of each


@dataclass(frozen=True, slots=True)
class _Sent:
    """What the ranks of an axis get from each other."""

    axis: str
    bytes: float  # of all together
    waits: bool = True  # nothing is computed meanwhile


@dataclass(frozen=True, slots=True)
class _Way:
    """A layer forward or back: what a rank computes, and what travels."""

    computing: float
    sent: tuple[_Sent, ...] = ()


@dataclass(frozen=True, slots=True)
class _Pass:
    """One rank's part of one pass."""

    task: Task
    layout: RankLayout
    machines: Machines
    software: Software
    passes: int  # of a step

    @property
    def tokens(self) -> float:
        return self.task.tokens * self.part

    @property
    def part(self) -> float:
        return 1 / (self.layout.samplers * self.layout.context * self.passes)

    @property
    def block(self) -> float:
        """Weights of a block that a rank multiplies with."""
        sizes = self.task.job.sizes
        return shapes_of(sizes).multiplied / sizes.layers / self.layout.tensor

    @property
    def trains(self) -> bool:
        """Whether weights of blocks do, not adapters alone."""
        return self.task.job.method in ("full", "freeze")

    def products(self, weights: float, columns: float) -> float:
        """Seconds of a product with weights."""
        return 2 * weights * columns / (self.machines.products * self.machines.reached)

    def moving(self, size: float) -> float:
        """Seconds in which so many bytes are read and written."""
        return size / (self.machines.bandwidth * BANDWIDTH)

    def layer(self, learns: bool) -> tuple[_Way, _Way]:
        """Forward and back."""
        sizes, again = self.task.job.sizes, self.layout.recompute
        products = self.products(self.block, self.tokens)
        pairs = self.task.pairs * self.part * sizes.heads / self.layout.tensor
        started, measured = self.machines.started, self.machines.measured
        attention = self.products(2 * sizes.head_width, pairs) / (1.0 if measured else ATTENDING)
        moved = 0.0 if measured else self.moving(self._read() + pairs * self.software.scores)
        packed = self.task.job.base in PACKED
        unpacked = self.moving(self.block * UNPACKED) if packed else 0.0
        ahead = products + attention + moved + unpacked
        back = (2 if self.trains else 1) * products + 2 * attention + 2 * moved + unpacked
        begin = sum if measured else max  # a device is told ahead what to do
        ahead = begin((ahead, started / 3))
        back = begin((back, started * 2 / 3)) + again * ahead
        forward = _Way(ahead, tuple(self._sent()))
        return forward, _Way(back, tuple(self._sent_back())) if learns else _Way(0.0)

    def head(self) -> tuple[_Way, _Way]:
        """The head and its loss; gradients are made with the loss where that goes by chunks."""
        job, targets = self.task.job, self.task.targets * self.part
        weights = job.sizes.vocabulary * job.sizes.width / self.layout.tensor
        products = (
            2 * weights * targets / (self.machines.head or self.machines.products * self.machines.reached)
        )
        moved = self.moving(weights / job.sizes.width * targets * LOGIT) * (not self.machines.measured)
        return _Way(products + moved), _Way(products * (2 if job.method == "full" else 1))

    def _read(self) -> float:
        """Bytes forward. Norms and sums read and write the width, rotation and attention the heads, the gated
        unit the MLP.
        """
        sizes, tensor = self.task.job.sizes, self.layout.tensor
        wide = (13 if sizes.sandwich else 9) * sizes.width / (tensor if self.software.parted_norms else 1)
        heads = 4 * (sizes.heads + sizes.kv_heads) * sizes.head_width / tensor
        units = 3 * sizes.mlp_width / tensor
        return self.tokens * ACTIVATION * (wide + heads + units) * self.software.elementwise

    def _sent(self) -> Iterator[_Sent]:
        """Two sums, each of which goes round twice; keys and values; weights, while others compute."""
        sizes, job = self.task.job.sizes, self.task.job
        yield _Sent("tensor", 2 * 2 * self.tokens * sizes.width * ACTIVATION)
        keys = 2 * sizes.kv_heads * sizes.head_width / self.layout.tensor
        yield _Sent("context", self.tokens * self.layout.context * keys * ACTIVATION)
        kept = sent_size(job) if self.trains else KEPT[job.base]
        yield _Sent("shard", self.block * (self.software.gathered or kept), waits=False)

    def _sent_back(self) -> Iterator[_Sent]:
        """The same again, gradients of keys and values, and of weights that train."""
        for sent in self._sent():
            if sent.axis == "tensor":
                yield _Sent("tensor", sent.bytes * (1 + self.layout.recompute))
            elif sent.axis == "context":
                yield _Sent("context", sent.bytes * (2 + self.layout.recompute))
            else:
                yield sent
        yield _Sent("shard", self.block * self.software.summed * self.trains, waits=False)

    @property
    def trained(self) -> float:
        """Weights that a rank updates, where stages are alike."""
        layout = self.layout
        divided = layout.group("shard")[0] if layout.shard > 1 else 1
        return trained_weights(self.task.job) / layout.tensor / layout.pipeline / divided

    def taken(self, way: _Way) -> tuple[float, list[Traffic]]:
        """Seconds of a layer one way, and what travels: some of it beside the computing, while that lasts."""
        waiting = [self._carried(sent) for sent in way.sent if sent.waits]
        beside = [self._carried(sent) for sent in way.sent if not sent.waits]
        busy = sum(one.seconds for one in beside)
        late = max(0.0, 1 - way.computing / busy) if busy and not self.machines.measured else 1.0
        found = waiting + [replace(one, waited=late * one.seconds) for one in beside]
        return way.computing + sum(one.waited for one in found), found

    def _carried(self, sent: _Sent) -> Traffic:
        group, stride = self.layout.group(sent.axis)
        network, seconds = self.machines.carry(sent.bytes, group, stride)
        return Traffic(sent.axis, network, sent.bytes * (1 - 1 / group), seconds, seconds)

    def edge(self) -> Traffic:
        """From one stage to the next, over the slowest link between two."""
        stages, stride = self.layout.group("pipeline")
        size = self.tokens * self.task.job.sizes.width * ACTIVATION if stages > 1 else 0.0
        if stages * stride <= self.machines.together:
            network, seconds = self.machines.carry(2 * size, min(2, stages), stride)
        else:
            network, seconds = True, size * self.machines.together / self.machines.network / CARRIED
        return Traffic("pipeline", network, size, seconds, seconds)

    def after(self) -> list[Traffic]:
        """After the last pass copies of a weight have their gradients summed."""
        return [self._carried(_Sent("data", 2 * self.trained * self.software.summed))]


def anything(_stage: int, _start: int, _stop: int) -> bool:
    """Memory for all layers."""
    return True


def passes_of(task: Task, layout: RankLayout) -> int:
    """Of a step, on each rank."""
    return max(1, ceil(task.tokens / layout.samplers / layout.context / layout.micro_tokens * (1 - 1e-9)))


def step_time(
    task: Task,
    layout: RankLayout,
    machines: Machines,
    software: Software = OURS,
    fits: Fits = anything,
) -> StepTime:
    """Of ranks that are alike, whose stages are cut so that the slowest is as fast as can be. `fits`: which
    layers a stage has the memory for; ValueError if no cut does.
    """
    passes, layers = passes_of(task, layout), task.job.sizes.layers
    one = _Pass(task, layout, machines, software, passes)
    frozen = layers - task.job.last if task.job.method == "freeze" else 0
    kinds = {learns: [one.taken(way) for way in one.layer(learns)] for learns in (False, True)}
    ways = [kinds[number >= frozen] for number in range(layers)]
    head = [one.taken(way)[0] for way in one.head()]
    times, stages = _stages(ways, head, layout, fits)
    slowest = max(map(sum, times))
    crossing = one.edge()
    if layout.chunks > 1:
        filled = (passes + (layout.pipeline - 1) / layout.chunks) * slowest
    else:
        few = min(passes, SETTLED * layout.pipeline)
        ahead, back = zip(*times, strict=True)
        filled = seconds_of(ahead, back, few, crossing.seconds) + (passes - few) * slowest
    worst = max(range(len(stages)), key=lambda place: sum(times[place]))
    start = sum(stages[:worst])
    sent = [each for both in ways[start : start + stages[worst]] for _, found in both for each in found]
    traffic = _together([(passes, each) for each in (*sent, crossing, crossing)], one.after())
    waited = sum(each.waited for each in traffic if each.axis not in ("data", "pipeline"))
    after = sum(each.waited for each in traffic if each.axis == "data")
    update = one.moving(one.trained * MOVED[task.job.optimizer])
    return StepTime(
        seconds=filled + after + update,
        computing=passes * slowest - waited,
        bubble=filled - passes * slowest,
        update=update,
        traffic=traffic,
        stages=stages,
    )


def _stages(
    ways: Sequence[Sequence[tuple[float, list[Traffic]]]],
    head: Sequence[float],
    layout: RankLayout,
    fits: Fits,
) -> tuple[list[tuple[float, float]], tuple[int, ...]]:
    """Seconds of a pass forward and back in each stage, and how many layers it has."""
    each, parts = [ahead[0] + back[0] for ahead, back in ways], layout.pipeline * layout.chunks
    shares = tuple(round(one / each[-1], 2) for one in (*each, sum(head)))
    cut = (
        _even(shares, parts)
        if fits is anything
        else cut_stages(LayerCosts(shares[:-1], last=shares[-1]), parts, fits)
    )
    if cut is None:
        raise ValueError(f"{len(ways)} layers are not {parts} stages")
    times: list[tuple[float, float]] = []
    stages = tuple(sum(cut[place :: layout.pipeline]) for place in range(layout.pipeline))
    for place, count in enumerate(stages):
        own = ways[sum(stages[:place]) :][:count]
        last = place == layout.pipeline - 1
        ahead, back = (sum(way[turn][0] for way in own) + last * head[turn] for turn in (0, 1))
        times.append((ahead, back))
    return times, stages


@lru_cache(maxsize=256)
def _even(shares: tuple[float, ...], parts: int) -> tuple[int, ...] | None:
    """The stages of layers with such shares of the time, the last of which is the head's."""
    return cut_stages(LayerCosts(shares[:-1], last=shares[-1]), parts)


def _together(of_passes: Iterable[tuple[int, Traffic]], after: Iterable[Traffic]) -> tuple[Traffic, ...]:
    """By axis, of a step."""
    found: dict[str, Traffic] = {}
    for times, one in (*of_passes, *((1, each) for each in after)):
        if one.bytes:
            before = found.get(one.axis, Traffic(one.axis, one.network, 0.0, 0.0, 0.0))
            found[one.axis] = replace(
                before,
                bytes=before.bytes + times * one.bytes,
                seconds=before.seconds + times * one.seconds,
                waited=before.waited + times * one.waited,
            )
    return tuple(found[axis] for axis in reversed(AXES) if axis in found)
