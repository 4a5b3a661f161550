"""How each parameter lies over the ranks, in one table: sums of gradients, their norm, what is saved and read
follow from it. A parameter without a cut is whole, or a DTensor that FSDP divides and sums.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from glm_accelerate.parallel.part import Part, as_part, part_of
from glm_accelerate.parallel.place import ORDER, SINGLE, Place

CPU = torch.device("cpu")

Axis = tuple[str, ...]
Read = Callable[[Sequence[int], Sequence[int]], Tensor]  # the box of a whole tensor at an offset, of a shape


@dataclass(frozen=True, slots=True)
class Cut:
    """How a parameter is cut before FSDP sees it: these intervals of the whole along `dim`, one after the
    other, are here. No interval: all of it is here. Several: along the first dimension only.
    """

    dim: int = 0
    size: int = 0  # of the whole along `dim`
    intervals: tuple[tuple[int, int], ...] = ()
    divided: Axis = ()  # axes along which other ranks hold other parts; never the pipeline
    partial: Axis = ()  # axes besides the samples' over which its gradient is yet to be summed
    counted: bool = True  # False: an earlier stage has it too, which counts it in the norm and saves it
    settled: bool = True  # False: its gradient is not yet whole when all backward passes have added to it


WHOLE = Cut()


@dataclass(frozen=True, slots=True)
class CutTable:
    """The trained parameters of a model, by name in the model's order, and how those that are cut lie."""

    weights: Mapping[str, nn.Parameter] = field(default_factory=dict[str, nn.Parameter])
    place: Place = SINGLE
    cuts: Mapping[str, Cut] = field(default_factory=dict[str, Cut])
    device: torch.device = CPU  # that they are on, if there are any: a stage may train nothing

    def cut(self, name: str) -> Cut:
        """The cut of a parameter, or of what an optimizer remembers of it."""
        return self.cuts.get(name.partition("::")[0], WHOLE)

    def whole(self, name: str, tensor: Tensor) -> bool:
        """Whether this rank holds all of it."""
        return not isinstance(tensor, DTensor) and not self.cut(name).intervals

    def norm(self, weights: Iterable[Tensor], norm: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """The norm of all gradients together. `norm` computes that of some, which FSDP may divide."""
        names: dict[Tensor, str] = (
            {weight: name for name, weight in self.weights.items()} if self.cuts else {}
        )
        by_axes: dict[Axis, list[Tensor]] = {}
        for weight in weights:
            cut = self.cut(names[weight]) if names else WHOLE
            if weight.grad is not None and cut.counted:
                by_axes.setdefault(cut.divided, []).append(weight.grad)
        staged = self.place.count("pipeline") > 1
        if not any(by_axes) and not staged:
            return norm(by_axes.get((), []))
        squares = [self._square(norm(each), axes) for axes, each in by_axes.items()]
        if not squares:  # of a step that taught this stage nothing
            squares.append(torch.zeros((), dtype=torch.float64, device=self.device))
        total = torch.stack(squares).sum()
        self.place.sum_(total, "pipeline")
        return total.sqrt()

    def part(self, name: str, tensor: Tensor) -> Part:
        """What this rank holds of a parameter, or of what an optimizer remembers of it."""
        cut, part = self.cut(name), part_of(tensor)
        cut = cut if cut.intervals and cut.dim < tensor.ndim else WHOLE  # a count of updates is not cut
        fsdp = ("data", "shard") if isinstance(tensor, DTensor) else ()
        others = [axis for axis in ORDER if axis not in (*cut.divided, *fsdp, "pipeline")]
        owned = part.owned and self.cut(name).counted and self.place.index(*others) == 0
        if cut is WHOLE:
            return replace(part, owned=owned)
        offset, shape = list(part.offset), list(part.shape)
        rows = _within(cut.intervals, offset[cut.dim], part.local.shape[cut.dim])
        shape[cut.dim], offset[cut.dim] = cut.size, rows[0][0] if rows else 0
        assert len(rows) < 2 or cut.dim == 0, (
            f"{name} is cut into several intervals of its dimension {cut.dim}"
        )
        return Part(part.local, tuple(shape), tuple(offset), owned, rows if len(rows) > 1 else ())

    def read(self, name: str, tensor: Tensor, read: Read) -> Tensor:
        """This rank's part of a parameter, or of a moment of it, from wherever the whole lies."""
        part = self.part(name, tensor)
        size = part.local.shape
        if not part.rows:
            return read(part.offset, size)
        boxes = (read((a, *part.offset[1:]), (b - a, *size[1:])) for a, b in part.rows)
        return torch.cat(list(boxes))

    def restore(self, name: str, tensor: Tensor, read: Read) -> Tensor:
        """What `read` gives, in the form that the tensor has."""
        return as_part(self.read(name, tensor, read).to(tensor.device), tensor)

    def _square(self, norm: Tensor, axes: Sequence[str]) -> Tensor:
        square = (norm.full_tensor() if isinstance(norm, DTensor) else norm).double().square()
        self.place.sum_(square, *axes)
        return square


ONE_PROCESS = CutTable()  # which has everything, whole


def _within(intervals: Sequence[tuple[int, int]], first: int, count: int) -> tuple[tuple[int, int], ...]:
    """The rows of the whole at positions [first, first + count) of the intervals put end to end."""
    rows: list[tuple[int, int]] = []
    at = 0
    for start, stop in intervals:
        low, high = max(first, at), min(first + count, at + stop - start)
        if low < high:
            rows.append((start + low - at, start + high - at))
        at += stop - start
    return tuple(rows)
