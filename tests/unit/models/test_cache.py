"""Slots of unequal length, taken, given back and taken again: what rows see is theirs alone."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from glm_accelerate.kernels.attention import attend_slots, unseen
from glm_accelerate.models.cache import KeyValueCache, Shelf
from glm_accelerate.models.sizes import Sizes

SIZES = Sizes(
    vocabulary=11, width=24, mlp_width=40, layers=2, heads=6, kv_heads=2, head_width=8,
    norm_epsilon=1e-5, rope_theta=1e4, rope_width=4, qkv_bias=True, max_positions=200,
)  # fmt: skip
SHELVES = [Shelf(2, 40), Shelf(3, 17)]


class Beside:
    """A cache, and each row's keys and values as they would be if every row had its own."""

    def __init__(self, before: int = 0) -> None:
        self.cache = KeyValueCache(SIZES, SHELVES, torch.float64, "cpu", before)
        self.rows: list[list[list[tuple[Tensor, Tensor]]]] = [[], []]  # shelf, slot, layer: what was stored
        self.generator = torch.Generator().manual_seed(0)
        self.prefix = [(self.drawn(2, before, 8), self.drawn(2, before, 8)) for _ in range(2)]
        self.before = before

    def drawn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def enter(self, shelves: list[int], lengths: list[int], fill: float | None = None) -> None:
        self.cache.enter(shelves, lengths)
        assert not self.cache.filled
        entering: list[list[tuple[Tensor, Tensor]]] = [[] for _ in shelves]
        for layer in range(2):
            k, v = self.drawn(1, sum(lengths), 2, 8), self.drawn(1, sum(lengths), 2, 8)
            if fill is not None:
                k, v = torch.full_like(k, fill), torch.full_like(v, fill)
            self.cache.fill(layer, k, v, self.prefix[layer] if self.before else None)
            parts = zip(k[0].split(lengths), v[0].split(lengths), strict=True)
            for row, part in zip(entering, parts, strict=True):
                before = (x.transpose(0, 1) for x in self.prefix[layer])
                row.append(tuple(torch.cat((b, x)) for b, x in zip(before, part, strict=True)))
        self.cache.advance(lengths)
        for shelf, row in zip(shelves, entering, strict=True):
            self.rows[shelf].append(row)

    def leave(self, shelf: int, slot: int) -> None:
        self.cache.leave(shelf, slot)
        self.rows[shelf][slot] = self.rows[shelf][-1]
        self.rows[shelf].pop()

    def grow(self) -> None:
        """One token of every row; what it sees is compared with what it should see."""
        living = [row for shelf in self.rows for row in shelf]
        lengths = [len(row[0][0]) for row in living]
        assert self.cache.positions_R.tolist() == [length - self.before for length in lengths]
        for layer in range(2):
            q, k, v = (self.drawn(len(living), 1, heads, 8) for heads in (6, 2, 2))
            out = self.cache.attend(layer, q, k, v)
            for number, row in enumerate(living):
                row[layer] = tuple(
                    torch.cat((x, new[number])) for x, new in zip(row[layer], (k, v), strict=True)
                )  # pyright: ignore[reportArgumentType]
                keys, values = (x.repeat_interleave(3, 1).transpose(0, 1) for x in row[layer])
                wanted = scaled_dot_product_attention(q[number].transpose(0, 1), keys, values)
                torch.testing.assert_close(out[number], wanted.transpose(0, 1))
        self.cache.advance()


@pytest.mark.parametrize("before", [0, 3])
def test_rows_come_and_go(before):
    both = Beside(before)
    both.enter([1, 0], [5, 30])
    both.grow()
    both.enter([1, 0, 1], [9, 4, 1])  # between the others, as the batch has them
    assert [both.cache.free(shelf) for shelf in (0, 1)] == [0, 0]
    both.grow()
    both.grow()
    both.leave(1, 0)  # the last moves in
    both.leave(0, 1)
    both.grow()
    both.leave(1, 1)
    both.enter([1, 1], [13 - before, 2])  # up to the end of a slot: 17 with what it grows
    for _ in range(4):
        both.grow()
    for shelf, slot in ((1, 2), (1, 1), (1, 0), (0, 0)):
        both.leave(shelf, slot)
    both.enter([0], [20])  # alone
    both.grow()


def test_what_a_broken_row_left_poisons_nobody():
    for fill in (float("nan"), float("inf")):
        both = Beside()
        both.enter([1, 1], [12, 2], fill=None)
        both.cache.enter([1], [14])
        for layer in range(2):
            broken = torch.full((1, 14, 2, 8), fill, dtype=torch.float64)
            both.cache.fill(layer, broken, broken)
        both.cache.advance([14])
        both.cache.leave(1, 2)
        both.grow()
        both.enter([1], [3])  # into the slot of the broken one
        both.grow()
        both.leave(1, 0)  # and on into another
        both.grow()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("keys", "queries", "width"), [(2, 32, 128), (1, 6, 8), (3, 3, 40)])
def test_shared_keys_are_as_exact_as_repeated_ones(dtype, keys, queries, width):
    """Against float64, beside PyTorch's attention over keys that are repeated for every query head."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([1, 77, 50, 13])
    q, k, v = (
        torch.randn(4, heads, tokens, width, generator=generator).to(dtype)
        for heads, tokens in ((queries, 1), (keys, 77), (keys, 77))
    )

    def plain(to: torch.dtype) -> Tensor:
        repeated = (x.to(to).repeat_interleave(queries // keys, 1) for x in (k, v))
        seen = (torch.arange(77) < lengths[:, None])[:, None, None]
        return scaled_dot_product_attention(q.to(to), *repeated, attn_mask=seen).transpose(1, 2)

    exact = plain(torch.float64)
    errors = [
        (out.double() - exact).abs().max()
        for out in (attend_slots(q.transpose(1, 2), k, v, unseen(lengths, 77, dtype)), plain(dtype))
    ]
    assert errors[0] <= 2 * errors[1] + torch.finfo(dtype).eps * exact.abs().max()
