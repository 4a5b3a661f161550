"""How a step's samples are laid into rows, from their lengths alone.

pack    whole documents side by side: one flat row where the step is small, else best fit into full rows
bucket  neighbours in length share a rectangle whose width comes from a short ladder
pad     in the order drawn, each rectangle as wide as its longest: the stock way
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from glm_accelerate.data.types import DOCUMENT_ALIGNMENT

Row = tuple[int, ...]  # which samples lie in a row, by their place in the step


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The rows of one forward pass, all `width` tokens wide."""

    rows: tuple[Row, ...]
    width: int

    @property
    def area(self) -> int:
        return len(self.rows) * self.width

    def of(self, places: Sequence[int]) -> "Arrangement":
        """The same, where what was arranged was a selection: its places in the whole."""
        return Arrangement(tuple(tuple(places[index] for index in row) for row in self.rows), self.width)


def aligned(length: int, step: int = DOCUMENT_ALIGNMENT) -> int:
    """Rounded up."""
    return -(-length // step) * step


def pack(lengths: Sequence[int], capacity: int) -> list[Arrangement]:
    """One row a pass. Rows are exactly `capacity` wide but for the emptiest, cut to what it holds."""
    capacity = max(capacity, aligned(max(lengths)))
    if sum(lengths) <= capacity:
        return [Arrangement((tuple(range(len(lengths))),), aligned(sum(lengths)))]
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # in each row, and which; the fullest first
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        fitting = bisect_left(free, (lengths[index], 0))  # best fit: the fullest that takes it
        if fitting == len(free):
            rows.append([])
            left, row = capacity, len(rows) - 1
        else:
            left, row = free.pop(fitting)
        rows[row].append(index)
        insort(free, (left - lengths[index], row))
    most = free[-1][0]
    emptiest = free[bisect_left(free, (most, 0))][1]
    return [
        Arrangement((tuple(sorted(row)),), aligned(capacity - most) if number == emptiest else capacity)
        for number, row in enumerate(rows)
    ]


def bucket(lengths: Sequence[int], capacity: int) -> list[Arrangement]:
    """Rectangles of neighbours in length, one sample a row."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    made: list[Arrangement] = []
    while order:
        width = _ladder(lengths[order[0]])
        count = max(1, capacity // width)
        taken, order = order[:count], order[count:]
        made.append(Arrangement(tuple((index,) for index in taken), width))
    return made


def pad(lengths: Sequence[int], capacity: int) -> list[Arrangement]:
    """Rectangles in the order drawn, as many samples as fit."""
    made: list[Arrangement] = []
    start = 0
    while start < len(lengths):
        stop, width = start + 1, lengths[start]
        while stop < len(lengths) and max(width, lengths[stop]) * (stop + 1 - start) <= capacity:
            width = max(width, lengths[stop])
            stop += 1
        made.append(Arrangement(tuple((index,) for index in range(start, stop)), width))
        start = stop
    return made


def widest_for(longest: int, capacity: int) -> int:
    """No pass of samples up to so long has a larger area, however they are laid."""
    return max(aligned(capacity), _ladder(longest))


def _ladder(length: int) -> int:
    """64, 128, ... 512, then in steps of an eighth, at most 12 % too wide: few widths."""
    step = DOCUMENT_ALIGNMENT
    while length > 8 * step:
        step *= 2
    return aligned(length, step)


ARRANGE: dict[str, Callable[[Sequence[int], int], list[Arrangement]]] = {
    "pack": pack,
    "bucket": bucket,
    "pad": pad,
}
