"""The rows that are being answered: how many side by side, how much room each gets, who comes next. Prompts
come in packed, and then every row grows by a token a pass. Inference mode is on only inside methods, so that
it never reaches whoever consumes an answer.

Letters: R living rows in the order of the cache's shelves, T tokens, H width.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from glm_accelerate.generate.sample import Sampling, pick
from glm_accelerate.kernels.choose import cache_dtype
from glm_accelerate.models.cache import KeyValueCache, Shelf
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.layout import Layout
from glm_accelerate.runtime.device import device_of

READ = 4096  # tokens of prompts in one pass, or a single longer one: bounds what a pass needs in memory
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


NewTokens = list[tuple[Row, list[int]]]  # of rows, from one or more passes


class Decoding:
    """A model, its cache, and who has which slot."""

    def __init__(self, model: Decoder, shelves: Sequence[Shelf], sampling: Sampling) -> None:
        self.model, self.sampling = model, sampling
        self.device = model.embed.device
        self.generator = sampling.generator(self.device)
        dtype = cache_dtype(self.device, model.compute or model.embed.dtype)
        before = 0 if model.prefix is None else model.prefix()[0][0].shape[1]
        self.cache = KeyValueCache(model.sizes, shelves, dtype, self.device, before)
        self.shelves: list[list[Row]] = [[] for _ in shelves]  # who lives in the cache's slots
        self._last_R: Tensor | None = None  # every row's last token, until the rows change

    @property
    def living(self) -> list[Row]:
        return [row for shelf in self.shelves for row in shelf]

    @property
    def free(self) -> list[int]:
        """Slots of each shelf that nobody has."""
        return [self.cache.free(number) for number in range(len(self.shelves))]

    def read(self, coming: Sequence[tuple[Row, int]]) -> NewTokens:
        """Let rows in, each on its shelf. Returns their first tokens."""
        new, first, tokens = NewTokens(), 0, 0
        for number, (row, _) in enumerate(coming):
            if number > first and tokens + len(row.prompt) > READ:
                new += self._read(coming[first:number])
                first, tokens = number, 0
            tokens += len(row.prompt)
        new += self._read(coming[first:])
        self._last_R = None
        return new

    @torch.inference_mode()
    def _read(self, coming: Sequence[tuple[Row, int]]) -> NewTokens:
        """Read prompts in one pass, packed."""
        lengths = [len(row.prompt) for row, _ in coming]
        self.cache.enter([shelf for _, shelf in coming], lengths)
        for row, shelf in coming:
            self.shelves[shelf].append(row)
        tokens_1T = torch.tensor([[token for row, _ in coming for token in row.prompt]], device=self.device)
        hidden_1TH = self.model.hidden(tokens_1T, Layout.of_documents([lengths], self.device), self.cache)
        last_N = torch.tensor(lengths, device=self.device).cumsum(0) - 1
        tokens = self._pick(hidden_1TH[0, last_N]).tolist()
        return [(row, [token]) for (row, _), token in zip(coming, tokens, strict=True)]

    @torch.inference_mode()
    def grow(self, passes: int = 1) -> NewTokens:
        """Pick so many more tokens of every row; the device is waited for once."""
        rows, last_R = self.living, self._last_R
        if last_R is None:
            last_R = torch.tensor([row.answer[-1] for row in rows], device=self.device)
        picked: list[Tensor] = []
        for _ in range(passes):
            layout = Layout(((1,),) * len(rows), self.cache.positions_R[:, None])
            last_R = self._pick(self.model.hidden(last_R[:, None], layout, self.cache)[:, 0])
            picked.append(last_R)
        self._last_R = last_R
        return list(zip(rows, torch.stack(picked, 1).tolist(), strict=True))

    @torch.inference_mode()
    def drop(self, rows: Iterable[Row]) -> None:
        """Let rows go that are answered. Their slots are free again."""
        gone = {row.number for row in rows}
        for number, shelf in enumerate(self.shelves):
            for slot in reversed(range(len(shelf))):
                if shelf[slot].number in gone:
                    self.cache.leave(number, slot)
                    shelf[slot] = shelf[-1]
                    shelf.pop()
        if gone:
            self._last_R = None

    def _pick(self, hidden_RH: Tensor) -> Tensor:
        return pick(self.model.logits(hidden_RH), self.sampling, self.generator)


def take_fitting(waiting: list[Row], shelves: Sequence[Shelf], free: Sequence[int]) -> list[tuple[Row, int]]:
    """Rows out of `waiting`, sorted by need, for the free slots of each shelf, with its number. Long shelves
    come first, and the longest row that fits: who comes late should not take long.
    """
    taken: list[tuple[Row, int]] = []
    for number, (shelf, slots) in enumerate(zip(shelves, free, strict=True)):
        for _ in range(slots):
            fitting = bisect_right(waiting, shelf.capacity, key=lambda row: row.need)
            if not fitting:
                break
            taken.append((waiting.pop(fitting - 1), number))
    return taken


def plan_shelves(needs: Sequence[int], rows: int, tokens: int, alike: float) -> tuple[Shelf, ...]:
    """At most `rows` slots of at most `tokens` in all, or a single one. Needs are shared out over slots by
    length, and a slot holds the longest of its share: so not every slot has room for the longest of all.
    Slots that are alike get the capacity of the longest of them, and are one shelf.
    """
    longest_first = sorted(needs, reverse=True)
    rows = min(rows, len(needs))
    while True:
        capacities: list[int] = []
        for row in range(rows):
            need = longest_first[row * len(needs) // rows]
            capacities.append(capacities[-1] if capacities and need >= alike * capacities[-1] else need)
        if rows == 1 or sum(capacities) <= tokens:
            return tuple(Shelf(len(list(group)), capacity) for capacity, group in groupby(capacities))
        rows -= max(1, rows // 16)


def affordable(model: Decoder) -> int:
    """For how many tokens there is memory. Of a GPU's whole memory a share, not of what happens to be free:
    ranks that answer together have to come to the same, and the same seed to the same answers.
    """
    device, sizes = model.embed.device, model.sizes
    record = device_of(device)
    memory = record.properties().total_memory // GPU_SHARE if record.streams else BYTES
    dtype = cache_dtype(device, model.compute or model.embed.dtype)
    return memory // (2 * sizes.layers * sizes.kv_heads * sizes.head_width * dtype.itemsize)
