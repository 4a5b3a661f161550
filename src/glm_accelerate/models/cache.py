"""Keys and values of sequences that grow side by side: slots, allocated once, taken and given back.

Slots of one capacity form a shelf. A shelf's living rows are its first slots, so attention reads slices: who
leaves makes room for the last. Letters: L layers, P places (a token's head each), K key/value heads, D head
width, R living rows in the order of their shelves, n those of one shelf, S tokens, T tokens of prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from glm_accelerate.kernels.attention import attend_slots, unseen
from glm_accelerate.models.sizes import Sizes
from glm_accelerate.runtime.device import send

GRAIN = 16  # capacities, and what attention reads of a shelf, are multiples of it: fewer shapes


@dataclass(frozen=True, slots=True)
class Shelf:
    slots: int
    capacity: int


@dataclass(frozen=True, slots=True)
class _Part:
    """A shelf's living rows in one pass: their rows in the batch, and what each of them sees."""

    shelf: int
    rows: slice
    seen: int
    bias_nS: Tensor | None  # None: the only row sees all


@dataclass(frozen=True, slots=True)
class _Pass:
    """The places of one more token of every row."""

    places_P: Tensor
    parts: tuple[_Part, ...]


class KeyValueCache:
    """`before` tokens of a learnt prefix open every slot; they count in `lengths`, not in positions."""

    def __init__(
        self,
        sizes: Sizes,
        shelves: Sequence[Shelf],
        dtype: torch.dtype,
        device: torch.device | str,
        before: int = 0,
    ) -> None:
        self.before, self.heads = before, sizes.kv_heads
        self.shelves = [Shelf(s.slots, -(-(s.capacity + before) // GRAIN) * GRAIN) for s in shelves]
        counts = [shelf.slots * shelf.capacity * self.heads for shelf in self.shelves]
        self._starts = [0, *accumulate(counts)]
        shape = (sizes.layers, sum(counts), sizes.head_width)
        self._keys_LPD = torch.empty(shape, dtype=dtype, device=device)  # a slot is cleared when it is taken
        self._values_LPD = torch.empty(shape, dtype=dtype, device=device)
        self._views = [
            tuple(
                whole[:, start : start + count].view(
                    sizes.layers, shelf.slots, self.heads, shelf.capacity, sizes.head_width
                )
                for whole in (self._keys_LPD, self._values_LPD)
            )
            for shelf, start, count in zip(self.shelves, self._starts, counts, strict=False)
        ]
        self.lengths: list[list[int]] = [[] for _ in shelves]  # of each shelf's living rows
        self._entering: tuple[Tensor, Tensor] | None = None  # places of prompts that are read, of prefixes
        self._lengths_R: Tensor | None = None  # on the device, until the rows change
        self._firsts_R = self._heads_RK = torch.empty(0)
        self._pass: _Pass | None = None

    @property
    def filled(self) -> bool:
        """The next pass brings one token a row, not prompts."""
        return self._entering is None

    def free(self, shelf: int) -> int:
        """The number of free slots."""
        return self.shelves[shelf].slots - len(self.lengths[shelf])

    def enter(self, shelves: Sequence[int], lengths: Sequence[int]) -> None:
        """The next pass reads prompts of these lengths, side by side; each takes a slot of its shelf."""
        firsts: list[int] = []
        for shelf, length in zip(shelves, lengths, strict=True):
            assert self.free(shelf)
            assert self.before + length <= self.shelves[shelf].capacity
            slot = len(self.lengths[shelf])
            for view in self._views[shelf]:
                view[:, slot] = 0  # masked keys must be finite all the same
            self.lengths[shelf].append(self.before + length)
            firsts.append(self._first(shelf, slot))
        capacities = [self.shelves[shelf].capacity for shelf in shelves]
        behind = [first + self.before for first in firsts]
        befores = [self.before] * len(firsts)
        self._entering = self._spread(behind, lengths, capacities), self._spread(firsts, befores, capacities)
        self._lengths_R = self._pass = None

    def fill(
        self, layer: int, k_1TKD: Tensor, v_1TKD: Tensor, prefix: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Store the keys and values of the prompts that enter, behind `prefix` (KPD each) if there is one."""
        assert self._entering is not None
        places_P, before_P = self._entering
        self._store(layer, places_P, k_1TKD, v_1TKD)
        if prefix is not None:
            rows = len(before_P) // (self.before * self.heads)
            self._store(layer, before_P, *(x.transpose(0, 1).repeat(rows, 1, 1) for x in prefix))

    def attend(self, layer: int, q_R1ND: Tensor, k_R1KD: Tensor, v_R1KD: Tensor) -> Tensor:
        """Store one token of every row and let it see its own. Returns out_R1ND in the cache's dtype."""
        current = self._pass = self._pass or self._next()
        self._store(layer, current.places_P, k_R1KD, v_R1KD)
        q_R1ND = q_R1ND.to(self._keys_LPD.dtype)
        outs: list[Tensor] = []
        for part in current.parts:
            q_n1ND = q_R1ND[part.rows]
            keys, values = (view[layer, : len(q_n1ND), :, : part.seen] for view in self._views[part.shelf])
            outs.append(attend_slots(q_n1ND, keys, values, part.bias_nS))
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    def advance(self, lengths: Sequence[int] | None = None) -> None:
        """After all layers: the prompts are in (their `lengths` are known), or every row has grown by one."""
        if lengths is None:
            self.lengths = [[length + 1 for length in shelf] for shelf in self.lengths]
            if self._lengths_R is not None:
                self._lengths_R += 1
        self._entering = self._pass = None

    def leave(self, shelf: int, slot: int) -> None:
        """Give a slot back. The shelf's last row moves into it: one row is copied, instead of a hole that
        every pass from now on would read.
        """
        lengths = self.lengths[shelf]
        last, old = len(lengths) - 1, lengths[slot]
        if slot < last:
            for view in self._views[shelf]:
                view[:, slot, :, : lengths[last]] = view[:, last, :, : lengths[last]]
                view[:, slot, :, lengths[last] : old] = 0
            lengths[slot] = lengths[last]
        lengths.pop()
        self._lengths_R = self._pass = None

    @property
    def positions_R(self) -> Tensor:
        """The position of every row's next token."""
        return self._on_device() - self.before

    def _on_device(self) -> Tensor:
        if self._lengths_R is None:
            device = self._keys_LPD.device
            slots = [(s, slot) for s, shelf in enumerate(self.lengths) for slot in range(len(shelf))]
            lengths = [length for shelf in self.lengths for length in shelf]
            self._lengths_R = torch.tensor(lengths, device=device)
            self._firsts_R = torch.tensor([self._first(*slot) for slot in slots], device=device)
            capacities_R = torch.tensor([self.shelves[s].capacity for s, _ in slots], device=device)
            self._heads_RK = capacities_R[:, None] * torch.arange(self.heads, device=device)
        return self._lengths_R

    def _next(self) -> _Pass:
        lengths_R = self._on_device()
        places_RK = (self._firsts_R + lengths_R)[:, None] + self._heads_RK
        parts: list[_Part] = []
        start = 0
        for number, shelf in enumerate(self.lengths):
            if not shelf:
                continue
            rows, seen, bias_nS = slice(start, start + len(shelf)), max(shelf) + 1, None
            if len(shelf) > 1:
                seen = -(-seen // GRAIN) * GRAIN
                bias_nS = unseen(lengths_R[rows] + 1, seen, self._keys_LPD.dtype)
            parts.append(_Part(number, rows, seen, bias_nS))
            start = rows.stop
        return _Pass(places_RK.flatten(), tuple(parts))

    def _store(self, layer: int, places_P: Tensor, k: Tensor, v: Tensor) -> None:
        for whole_LPD, new in ((self._keys_LPD, k), (self._values_LPD, v)):
            flat_PD = new.reshape(-1, new.shape[-1]).to(whole_LPD.dtype)
            whole_LPD[layer].index_copy_(0, places_P, flat_PD)

    def _first(self, shelf: int, slot: int) -> int:
        """The place of a slot's first token in its first head."""
        return self._starts[shelf] + slot * self.heads * self.shelves[shelf].capacity

    def _spread(self, firsts: Sequence[int], counts: Sequence[int], capacities: Sequence[int]) -> Tensor:
        """The places of `counts` tokens from each of `firsts` on, all heads of a token side by side."""
        tokens_T = torch.cat([torch.arange(f, f + n) for f, n in zip(firsts, counts, strict=True)])
        apart_T = torch.tensor(capacities).repeat_interleave(torch.tensor(counts))
        places_TK = tokens_T[:, None] + apart_T[:, None] * torch.arange(self.heads)
        return send(places_TK.flatten(), self._keys_LPD.device)
