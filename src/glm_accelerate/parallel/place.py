"""This process's place among the ranks: its index along each axis, and sums over the ranks along some."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from glm_accelerate.parallel.axes import LOSS, ORDER, SAMPLES, Axes
from glm_accelerate.parallel.ranks import ALONE, Ranks

NO_AXES = Axes()  # of one process


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process is. Every rank of a job calls the same methods in the same order."""

    ranks: Ranks = ALONE
    axes: Axes = NO_AXES
    _groups: dict[tuple[str, ...], ProcessGroup | None] = field(
        default_factory=dict[tuple[str, ...], "ProcessGroup | None"], repr=False, compare=False
    )

    def __post_init__(self) -> None:
        assert self.axes.count(*ORDER) == self.ranks.count, f"{self.axes} is not {self.ranks.count} ranks"

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

    def sum_(self, tensor: Tensor, *names: str) -> None:
        """In place, over the ranks along these axes."""
        if self.count(*names) > 1:
            dist.all_reduce(tensor, group=self._group(names))

    def total(self, values: Sequence[float], *names: str) -> list[float]:
        """The sum of each value over the ranks along these axes (by default those that share the loss), the
        same to the last bit on each.
        """
        summed = torch.tensor(values, dtype=torch.float64)
        self.sum_(summed, *(names or LOSS))
        return summed.tolist()

    def mesh(self, device: torch.device) -> DeviceMesh:
        """What FSDP takes: data x shard, at this rank's place on all other axes."""
        names = [name for name, size in self.axes.sizes.items() if size > 1 or name in ("data", "shard")]
        whole = init_device_mesh(
            device.type, tuple(self.axes.sizes[name] for name in names), mesh_dim_names=tuple(names)
        )
        return whole["data", "shard"]

    def _group(self, names: Sequence[str]) -> ProcessGroup | None:
        """None: all ranks."""
        key = tuple(name for name in ORDER if name in names and self.axes.sizes[name] > 1)
        if self.count(*key) == self.ranks.count:
            return None
        if key not in self._groups:
            made, _ = dist.new_subgroups_by_enumeration(self.axes.groups(*key))
            assert isinstance(made, ProcessGroup)
            self._groups[key] = made
        return self._groups[key]


SINGLE = Place()
