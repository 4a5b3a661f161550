"""How a step's samples are dealt to ranks and laid into rows, from their lengths alone.

pack    whole documents side by side: one flat row where the step is small, else best fit into full rows
bucket  neighbours in length share a rectangle whose width comes from a short ladder
pad     in the order drawn, each rectangle as wide as its longest: the stock way
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from glm_accelerate.data.types import DOCUMENT_ALIGNMENT


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The rows of one forward pass, all `width` tokens wide."""

    rows: tuple[tuple[int, ...], ...]  # which samples lie in each, by their place in the step
    width: int

    @property
    def area(self) -> int:
        return len(self.rows) * self.width


def arranged(lengths: Sequence[int], batching: str, micro_tokens: int, ranks: int) -> list[list[Arrangement]]:
    """Each rank's passes of a step."""
    passes: list[list[Arrangement]] = []
    for share in deal(lengths, ranks):
        own = ARRANGE[batching]([lengths[place] for place in share], micro_tokens) if share else []
        passes.append(
            [
                replace(one, rows=tuple(tuple(share[index] for index in row) for row in one.rows))
                for one in own
            ]
        )
    return passes


def deal(
    lengths: Sequence[int], ranks: int, weight: Callable[[int], float] = lambda length: length
) -> list[list[int]]:
    """Places in the step, in order, for each rank: about equally many tokens each, or as much as samples
    weigh by their length. The longest sample goes first, to the rank with the least.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        rank = min(range(ranks), key=lambda rank: loads[rank])
        shares[rank].append(place)
        loads[rank] += weight(lengths[place])
    return [sorted(share) for share in shares]


def aligned(length: int, step: int = DOCUMENT_ALIGNMENT) -> int:
    """`length` rounded up to a multiple of `step`."""
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
    rectangles: list[Arrangement] = []
    while order:
        width = _ladder(lengths[order[0]])
        count = max(1, capacity // width)
        members, order = order[:count], order[count:]
        rectangles.append(Arrangement(tuple((index,) for index in members), width))
    return rectangles


def pad(lengths: Sequence[int], capacity: int) -> list[Arrangement]:
    """Rectangles in the order drawn, as many samples as fit."""
    rectangles: list[Arrangement] = []
    start = 0
    while start < len(lengths):
        stop, width = start + 1, lengths[start]
        while stop < len(lengths) and max(width, lengths[stop]) * (stop + 1 - start) <= capacity:
            width = max(width, lengths[stop])
            stop += 1
        rectangles.append(Arrangement(tuple((index,) for index in range(start, stop)), width))
        start = stop
    return rectangles


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
