"""How a step's samples are dealt to ranks and laid into rows, from their lengths alone.

pack    whole documents side by side: one flat row where the step is small, else best fit into full rows
bucket  neighbours in length share a rectangle whose width comes from a short ladder
pad     in the order drawn, each rectangle as wide as its longest: the stock way
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from glm_accelerate.data.types import DOCUMENT_ALIGNMENT, Piece

ROUND = 0.02  # of a step's time, that one more pass of all ranks has to save where they wait for each other


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The rows of one forward pass, all `width` tokens wide."""

    rows: tuple[tuple[int, ...], ...]  # which samples lie in each, by their place in the step
    width: int
    pieces: tuple[Piece, ...] = ()  # of documents that ranks share: they lie first in the only row

    @property
    def area(self) -> int:
        return len(self.rows) * self.width

    @property
    def places(self) -> list[int]:
        """The sample of each document, pieces first."""
        return [*(piece.place for piece in self.pieces), *(place for row in self.rows for place in row)]

    @property
    def gathered(self) -> int:
        """How many keys besides its own tokens' it sees: those before each piece."""
        return sum(piece.start for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Dealing:
    """By what a step's samples are dealt to ranks: what they cost, and how fast each rank is."""

    square: float = 0.0  # what the square of a document's length costs, where a token costs 1
    speeds: tuple[float, ...] = ()  # beside the fastest rank's; none: all are alike
    together: bool = False  # ranks wait for each other in every pass, as FSDP's do
    moves: bool = False  # factor and speeds are measured again as the run goes

    def cost(self, length: int) -> float:
        """Of a document."""
        return length + self.square * length**2

    def cost_of(self, piece: Piece) -> float:
        """Of a piece: of two at the same distance from both ends, on average."""
        return len(piece) * (1 + self.square * piece.whole)


BY_TOKENS = Dealing()


def arranged(
    lengths: Sequence[int],
    batching: str,
    micro_tokens: int,
    ranks: int,
    context: int = 1,
    dealing: Dealing = BY_TOKENS,
) -> list[list[Arrangement]]:
    """Each rank's passes of a step. A document longer than `micro_tokens` is shared by `context` neighbours,
    who have their pieces of it in passes of the same number.
    """
    cut = [place for place, length in enumerate(lengths) if context > 1 and length > micro_tokens]
    if batching == "pack" and dealing.together and not cut:
        return _in_rounds(lengths, micro_tokens, ranks, dealing)
    begun = _shared([(place, lengths[place]) for place in cut], micro_tokens, ranks, context, dealing)
    held = [[sum(map(len, pieces)) for pieces in own] for own in begun]
    loads = [sum(dealing.cost_of(piece) for pieces in own for piece in pieces) for own in begun]
    whole = sorted(set(range(len(lengths))) - set(cut))
    shares = deal([lengths[place] for place in whole], ranks, dealing.cost, loads, dealing.speeds)
    passes: list[list[Arrangement]] = []
    for share, used, pieces in zip(shares, held, begun, strict=True):
        places = [whole[index] for index in share]
        sizes, alone = [lengths[place] for place in places], list[Arrangement]()
        if batching == "pack" and used:
            own = pack(sizes, micro_tokens, used)
        else:
            alone = [Arrangement(((),), aligned(tokens)) for tokens in used]
            own = ARRANGE[batching](sizes, micro_tokens) if sizes else []
        own = [replace(one, rows=tuple(tuple(places[i] for i in row) for row in one.rows)) for one in own]
        laid = [*alone, *own]
        begins = [replace(one, pieces=each) for one, each in zip(laid, pieces, strict=False)]
        passes.append([*begins, *laid[len(begins) :]])
    return passes


def _in_rounds(
    lengths: Sequence[int], micro_tokens: int, ranks: int, dealing: Dealing
) -> list[list[Arrangement]]:
    """Where ranks wait for each other in every pass: the passes of one round, one of each rank, cost alike.
    More rounds than needed are made where that saves enough, as slow ranks have small passes then.
    """
    least = _rounds(lengths, micro_tokens, ranks, dealing, 0)
    count = len(least[1][0])
    more = {count, count + 1} | ({count * 5 // 4, count * 3 // 2, 2 * count} if dealing.speeds else set())
    tried = [least, *(_rounds(lengths, micro_tokens, ranks, dealing, each) for each in sorted(more))]
    _, places = min(tried, key=lambda one: one[0] * (1 + ROUND * (len(one[1][0]) - count)))
    return [
        [Arrangement((tuple(sorted(row)),), aligned(sum(lengths[at] for at in row))) for row in own if row]
        for own in places
    ]


def _rounds(
    lengths: Sequence[int], micro_tokens: int, ranks: int, dealing: Dealing, count: int
) -> tuple[float, list[list[list[int]]]]:
    """How long `count` or more rounds take, and the places of each rank in each: the longest sample goes
    first, to where it makes its round the least longer, of a rank that has the least.
    """
    capacity = max(aligned(micro_tokens), aligned(max(lengths)))
    speeds = np.array(dealing.speeds or [1.0] * ranks)
    taken, tokens = np.zeros((max(1, count), ranks)), np.zeros((max(1, count), ranks), np.int64)
    places: list[list[list[int]]] = [[[] for _ in taken] for _ in range(ranks)]
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if not (tokens + lengths[place] <= capacity).any():
            taken, tokens = (np.vstack([each, np.zeros_like(each[:1])]) for each in (taken, tokens))
            for own in places:
                own.append([])
        takes = dealing.cost(lengths[place]) / speeds
        longer = np.maximum(0.0, taken + takes - taken.max(axis=1, keepdims=True))
        longer[tokens + lengths[place] > capacity] = np.inf
        has = np.where(longer == longer.min(), taken.sum(axis=0) + takes, np.inf)
        number, rank = np.unravel_index(has.argmin(), has.shape)
        places[rank][number].append(place)
        taken[number, rank] += takes[rank]
        tokens[number, rank] += lengths[place]
    order = np.argsort(-taken.max(axis=1), kind="stable")
    return float(taken.max(axis=1).sum()), [[own[number] for number in order] for own in places]


def _shared(
    cut: Sequence[tuple[int, int]], micro_tokens: int, ranks: int, context: int, dealing: Dealing
) -> list[list[tuple[Piece, ...]]]:
    """The pieces in each pass of each rank. Neighbours have equally many passes, with the same documents."""
    passes: list[list[tuple[Piece, ...]]] = [[] for _ in range(ranks)]
    sizes, speeds = [length for _, length in cut], dealing.speeds[::context]  # neighbours have one speed
    for group, share in enumerate(deal(sizes, ranks // context, dealing.cost, speeds=speeds)):
        sizes = [longest_share(cut[index][1], context) for index in share]
        for one in pack(sizes, micro_tokens) if sizes else ():
            for rank in range(context):
                pieces = (pieces_of(*cut[share[index]], context, rank) for row in one.rows for index in row)
                passes[group * context + rank].append(tuple(piece for each in pieces for piece in each))
    return passes


def pieces_of(place: int, length: int, ranks: int, rank: int) -> tuple[Piece, Piece]:
    """What a rank has of a document that so many share: one piece counted from the start, one from the end,
    so that each sees as many tokens as the others.
    """
    spans = cut_spans(length, ranks)
    return Piece(place, *spans[rank], length), Piece(place, *spans[-1 - rank], length)


def cut_spans(length: int, ranks: int) -> list[tuple[int, int]]:
    """Two pieces a rank, in order, of which none is longer than another by more than a token."""
    ends = [length * number // (2 * ranks) for number in range(2 * ranks + 1)]
    return list(pairwise(ends))


def longest_share(length: int, ranks: int) -> int:
    """The most tokens that a rank has of a document that so many share."""
    return max(sum(map(len, pieces_of(0, length, ranks, rank))) for rank in range(ranks))


def deal(
    lengths: Sequence[int],
    ranks: int,
    weight: Callable[[int], float] = lambda length: length,
    begun: Sequence[float] = (),
    speeds: Sequence[float] = (),
) -> list[list[int]]:
    """Places in the step, in order, for each rank: about equally many tokens each, or as much as samples
    weigh by their length; of ranks of several speeds each as much as it is fast. The longest sample goes
    first, to the rank that would be done with it first. `begun`: what each has.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads, speeds = list(begun or [0.0] * ranks), speeds or [1.0] * ranks
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        more = weight(lengths[place])
        rank = min(range(ranks), key=lambda rank: (loads[rank] + more) / speeds[rank])
        shares[rank].append(place)
        loads[rank] += more
    return [sorted(share) for share in shares]


def aligned(length: int, step: int = DOCUMENT_ALIGNMENT) -> int:
    """`length` rounded up to a multiple of `step`."""
    return -(-length // step) * step


def pack(lengths: Sequence[int], capacity: int, begun: Sequence[int] = ()) -> list[Arrangement]:
    """One row a pass. Rows are exactly `capacity` wide but for the emptiest, cut to what it holds, as are the
    first if they are `begun` with so many tokens.
    """
    capacity = max(capacity, aligned(max((*lengths, *begun))))
    total = sum(lengths) + sum(begun)
    if total <= capacity and len(begun) < 2:
        return [Arrangement((tuple(range(len(lengths))),), aligned(total))]
    rows: list[list[int]] = [[] for _ in begun]
    free = sorted((capacity - used, row) for row, used in enumerate(begun))  # the fullest first
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
    emptiest, left_in = free[bisect_left(free, (most, 0))][1], {row: left for left, row in free}
    short = {emptiest, *range(len(begun))}
    return [
        Arrangement(
            (tuple(sorted(row)),), aligned(capacity - left_in[number]) if number in short else capacity
        )
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


def on_a_rank(length: int, micro_tokens: int, context: int) -> int:
    """The most tokens that a rank has of a document."""
    return longest_share(length, context) if context > 1 and length > micro_tokens else length


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
