"""How many prompts are answered side by side, how much room each gets, and who comes next."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from glm_accelerate.kernels.choose import cache_dtype
from glm_accelerate.models.cache import Shelf
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.runtime.device import device_of

BYTES = 2**30  # of keys and values on a CPU
GPU_SHARE = 16  # of a GPU's memory, one part in so many


@dataclass(frozen=True, slots=True)
class Manner:
    """How rows are answered on a device."""

    rows: int  # side by side at most: more gain little, since products are as fast as they get
    alike: float  # a slot joins the shelf of a longer one if it is at least this share of it
    unseen: int  # passes until tokens are looked at: a look makes a GPU idle, without one rows grow in vain


CPU = Manner(rows=128, alike=0.8, unseen=1)  # attention reads memory at a few GB/s: no row beyond its end
GPU = Manner(rows=256, alike=0.5, unseen=8)  # a shelf is a launch a layer


def manner_of(device: torch.device) -> Manner:
    return CPU if device.type == "cpu" else GPU


@dataclass(slots=True, eq=False)
class Row:
    """A prompt that is being answered, with room for so many tokens."""

    number: int
    prompt: Sequence[int]
    room: int
    answer: list[int] = field(default_factory=list[int])

    @property
    def need(self) -> int:
        return len(self.prompt) + self.room

    @property
    def left(self) -> int:
        return self.room - len(self.answer)


class WaitingRows:
    """Rows that have no slot yet. The longest that fits comes first: who comes late should not take long."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = sorted(rows, key=lambda row: (row.need, -row.number))

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def needs(self) -> list[int]:
        return [row.need for row in self._rows]

    def take(self, shelves: Sequence[Shelf], free: Sequence[int]) -> list[tuple[Row, int]]:
        """Rows for the free slots of each shelf, with its number. Long shelves come first."""
        taken: list[tuple[Row, int]] = []
        for number, (shelf, slots) in enumerate(zip(shelves, free, strict=True)):
            for _ in range(slots):
                fitting = bisect_right(self._rows, shelf.capacity, key=lambda row: row.need)
                if not fitting:
                    break
                taken.append((self._rows.pop(fitting - 1), number))
        return taken


def plan_shelves(needs: Sequence[int], rows: int, tokens: int, alike: float) -> tuple[Shelf, ...]:
    """At most `rows` slots of at most `tokens` in all, or a single one. Needs are shared out over slots by
    length, and a slot holds the longest of its share: so not every slot has room for the longest of all.
    """
    longest_first = sorted(needs, reverse=True)
    rows = min(rows, len(needs))
    while True:
        found = _shelved([longest_first[row * len(needs) // rows] for row in range(rows)], alike)
        if rows == 1 or sum(shelf.slots * shelf.capacity for shelf in found) <= tokens:
            return found
        rows -= max(1, rows // 16)


def _shelved(capacities: Sequence[int], alike: float) -> tuple[Shelf, ...]:
    """Neighbours of a falling row that are alike get the first one's capacity."""
    tops: list[int] = []
    for capacity in capacities:
        tops.append(tops[-1] if tops and capacity >= alike * tops[-1] else capacity)
    return tuple(Shelf(len(list(group)), top) for top, group in groupby(tops))


def affordable(model: Decoder) -> int:
    """For how many tokens there is memory. Of a GPU's whole memory a share, not of what happens to be free:
    ranks that answer together have to come to the same, and the same seed to the same answers.
    """
    device, sizes = model.embed.device, model.sizes
    record = device_of(device)
    memory = record.properties().total_memory // GPU_SHARE if record.streams else BYTES
    dtype = cache_dtype(device, model.compute or model.embed.dtype)
    return memory // (2 * sizes.layers * sizes.kv_heads * sizes.head_width * dtype.itemsize)
