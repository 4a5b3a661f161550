"""The axes along which the ranks of a job are laid out, and where this process is on each of them.

`Axes` is arithmetic from sizes to coordinates: nothing else computes with rank numbers. `Place` is one
process among the ranks: its index along each axis, and sums over the ranks along some.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from glm_accelerate.parallel.ranks import ALONE, Ranks
from glm_accelerate.plan.run_plan import RunPlan

# Outermost first. Ranks next to each other share a machine: the innermost axes talk most.
ORDER = ("pipeline", "data", "shard", "expert", "tensor", "query")
SAMPLES = ("data", "shard", "expert")  # ranks that differ along these take different samples
TENSOR = ("tensor", "query")  # ... along these, they share every product
LOSS = tuple(name for name in ORDER if name not in TENSOR)  # ... along these, they have parts of the loss


@dataclass(frozen=True, slots=True)
class Axes:
    """How many ranks there are along each axis. The product is the number of ranks."""

    pipeline: int = 1
    data: int = 1  # each holds the whole state
    shard: int = 1  # FSDP divides the state along it
    expert: int = 1
    tensor: int = 1  # each has other key heads
    query: int = 1  # each has other queries of the same key heads
    context: int = 1  # no axis: of the ranks that take other samples, so many neighbours share long documents

    @classmethod
    def of(cls, plan: RunPlan) -> "Axes":
        """As planned: as many ranks hold the whole state as are left."""
        pipeline = max(1, len(plan.stages))
        data = plan.ranks // (pipeline * plan.shards * plan.tensor * plan.query)
        return cls(pipeline, data, plan.shards, tensor=plan.tensor, query=plan.query, context=plan.context)

    @property
    def sizes(self) -> dict[str, int]:
        """By name, outermost first."""
        return {name: getattr(self, name) for name in ORDER}

    def count(self, *names: str) -> int:
        """How many ranks there are along these axes together."""
        return prod(self.sizes[name] for name in names)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The index of a rank on each axis."""
        indices: dict[str, int] = {}
        for name, size in reversed(self.sizes.items()):
            rank, indices[name] = divmod(rank, size)
        assert rank == 0, f"there are {self.count(*ORDER)} ranks"
        return indices

    def index(self, rank: int, *names: str) -> int:
        """The number of a rank among those along these axes."""
        number, at = 0, self.coordinates(rank)
        for name in ORDER:
            if name in names:
                number = number * self.sizes[name] + at[name]
        return number

    def groups(self, *names: str) -> list[list[int]]:
        """All groups of ranks that differ from each other along these axes alone."""
        members: dict[int, list[int]] = {}
        rest = [name for name in ORDER if name not in names]
        for rank in range(self.count(*ORDER)):
            members.setdefault(self.index(rank, *rest), []).append(rank)
        return list(members.values())

    def sharing(self) -> list[list[int]]:
        """All groups of ranks that share long documents, in the order of their pieces."""
        assert self.count(*SAMPLES) % self.context == 0, f"{self.context} ranks share a document in {self}"
        rest, members = [name for name in ORDER if name not in SAMPLES], dict[tuple[int, int], list[int]]()
        for rank in range(self.count(*ORDER)):
            place = self.index(rank, *SAMPLES) // self.context
            members.setdefault((self.index(rank, *rest), place), []).append(rank)
        return list(members.values())


ONE_RANK = Axes()


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process is. Ranks of one group call the same sums in the same order."""

    ranks: Ranks = ALONE
    axes: Axes = ONE_RANK

    def __post_init__(self) -> None:
        assert self.axes.count(*ORDER) == self.ranks.count, f"{self.axes} is not {self.ranks.count} ranks"

    @property
    def _groups(self) -> dict[tuple[tuple[str, ...], bool], ProcessGroup]:
        """Those that were made, for the next attempt of this process, too."""
        return self.ranks.groups.setdefault((self.axes, self.ranks.nodes), {})

    def index(self, *names: str) -> int:
        """This rank's number among those along these axes."""
        return self.axes.index(self.ranks.rank, *names)

    def count(self, *names: str) -> int:
        """How many ranks there are along these axes."""
        return self.axes.count(*names)

    @property
    def samples(self) -> tuple[int, int]:
        """Which share of a step's samples is this rank's, of how many. Dropout is seeded by it, too."""
        return self.index(*SAMPLES), self.count(*SAMPLES)

    def share(self, size: int, *names: str) -> tuple[int, int]:
        """This rank's part of so many, where the ranks along these axes have an equal part each."""
        count, index = self.count(*names), self.index(*names)
        assert size % count == 0, f"{size} in {count} equal parts"
        return size // count * index, size // count * (index + 1)

    def sum_(self, tensor: Tensor, *names: str) -> None:
        """In place, over the ranks along these axes."""
        if self.count(*names) > 1:
            dist.all_reduce(tensor, group=self.group(*names))

    def add_up(self, flat: Tensor, *names: str) -> Iterator[Work]:
        """Sum a vector in place over the ranks along these axes. Yields the messages that it takes: each has
        to have arrived before the next is asked for. Each rank of a node sends its part of the node's sum.
        """
        across = self._groups.get((("across", *names), False))
        if across is None:
            yield _on_the_way(dist.all_reduce(flat, group=self.group(*names), async_op=True))
            return
        within, again = (self._groups[("within", *names), copy] for copy in (False, True))
        whole = torch.cat([flat, flat.new_zeros(-len(flat) % within.size())])
        parts = list(whole.chunk(within.size()))
        own = torch.empty_like(parts[0])
        yield _on_the_way(dist.reduce_scatter(own, parts, group=within, async_op=True))
        yield _on_the_way(dist.all_reduce(own, group=across, async_op=True))
        yield _on_the_way(dist.all_gather(parts, own, group=again, async_op=True))
        flat.copy_(whole[: len(flat)])

    def total(self, values: Sequence[float], *names: str) -> list[float]:
        """The sum of each value over the ranks along these axes (by default those that share the loss), the
        same to the last bit on each.
        """
        summed = torch.tensor(values, dtype=torch.float64)
        self.sum_(summed, *(names or LOSS))
        return summed.tolist()

    def along(self, *names: str) -> list[int]:
        """The ranks that differ from this one along these axes alone, itself among them, in their order."""
        return next(group for group in self.axes.groups(*names) if self.ranks.rank in group)

    def meet(self) -> None:
        """Make all groups now, on every rank in one order: stages come to them in different orders later."""
        for names in (("pipeline",), TENSOR, ("tensor",), ("query",), SAMPLES, LOSS):
            for more in ((), SAMPLES):
                self.group(*names, *more)
        self.group("pipeline", copy=True)

    def meet_to_add(self, *names: str) -> None:
        """Make the groups of `add_up` now, as ranks come to it at different times. Where all nodes have as
        many of these ranks, and more than one, sums go by node.
        """
        self.group(*names)
        nodes: dict[str, list[int]] = {}
        for rank in self.along(*names) if self.ranks.nodes else ():
            nodes.setdefault(self.ranks.nodes[rank], []).append(rank)
        sizes = {len(each) for each in nodes.values()}
        if len(nodes) == 1 or len(sizes) != 1 or 1 in sizes:
            return
        within = nodes[self.ranks.nodes[self.ranks.rank]]
        at = within.index(self.ranks.rank)
        self._make(("across", *names), [each[at] for each in nodes.values()])
        for copy in (False, True):  # what begins a sum and what ends it are sent at different times, too
            self._make(("within", *names), within, copy=copy)

    def group(self, *names: str, copy: bool = False) -> ProcessGroup | None:
        """The ranks along these axes; None: all ranks. `copy`: another group of the same ranks."""
        key = tuple(name for name in ORDER if name in names and self.axes.sizes[name] > 1)
        if not copy and self.count(*key) == self.ranks.count:
            return None
        if (key, copy) not in self._groups:
            self._make(key, self.along(*key), copy=copy)
        return self._groups[key, copy]

    def _make(self, key: tuple[str, ...], members: list[int], copy: bool = False) -> None:
        group = dist.new_group(members, use_local_synchronization=True)
        assert isinstance(group, ProcessGroup)
        self._groups[key, copy] = group

    def mesh(self, device: torch.device) -> DeviceMesh:
        """What FSDP takes: data x shard, at this rank's place on all other axes."""
        made: DeviceMesh | None = self.ranks.groups.get(("mesh", self.axes))
        if made is not None:
            return made
        names = [name for name, size in self.axes.sizes.items() if size > 1 or name in ("data", "shard")]
        whole = init_device_mesh(
            device.type, tuple(self.axes.sizes[name] for name in names), mesh_dim_names=tuple(names)
        )
        self.ranks.groups["mesh", self.axes] = made = whole["data", "shard"]
        return made


def _on_the_way(message: Work | None) -> Work:
    assert message is not None
    return message


SINGLE = Place()
