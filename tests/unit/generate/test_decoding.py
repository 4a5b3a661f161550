"""How slots are shared out among prompts of unequal needs, and who takes which."""

import random

import pytest

from glm_accelerate.generate.decoding import Row, affordable, plan_shelves, take_fitting
from glm_accelerate.models.cache import KeyValueCache, Shelf


def rows(needs: list[int], room: int = 4) -> list[Row]:
    return [Row(number, [5] * (need - room), room) for number, need in enumerate(needs)]


@pytest.mark.parametrize(("most", "tokens"), [(1, 10**9), (7, 10**9), (64, 10**9), (64, 9_000), (64, 10)])
def test_slots_stay_within_rows_and_tokens_and_hold_the_longest(most, tokens):
    chance = random.Random(0)
    needs = [int(chance.lognormvariate(5, 1)) + 5 for _ in range(200)]
    shelves = plan_shelves(needs, most, tokens, 0.6)
    slots = sum(shelf.slots for shelf in shelves)
    assert 1 <= slots <= most
    assert slots == 1 or sum(shelf.slots * shelf.capacity for shelf in shelves) <= tokens
    assert max(shelf.capacity for shelf in shelves) == max(needs)
    assert [shelf.capacity for shelf in shelves] == sorted({s.capacity for s in shelves}, reverse=True)


def test_one_long_prompt_does_not_make_every_slot_long():
    shelves = plan_shelves([100] * 63 + [5_000], 64, 10**9, 0.6)
    assert shelves == (Shelf(1, 5_000), Shelf(63, 100))
    assert plan_shelves([100, 90, 70, 59], 4, 10**9, 0.6) == (Shelf(3, 100), Shelf(1, 59))  # alike: together


def test_memory_bounds_the_rows(pair):
    sizes = pair.ours.sizes
    tokens = affordable(pair.ours)
    shelves = plan_shelves([1_000] * 100_000, 100_000, tokens, 0.6)
    bytes_a_token = 2 * sizes.layers * sizes.kv_heads * sizes.head_width * 8
    assert 0.9 * 2**30 < sum(s.slots * s.capacity for s in shelves) * bytes_a_token <= 2**30
    small = KeyValueCache(sizes, plan_shelves([50, 20], 2, tokens, 0.6), pair.ours.embed.dtype, "cpu")
    assert [shelf.capacity for shelf in small.shelves] == [64, 32]  # rounded up


def test_the_longest_that_fits_goes_first():
    waiting = sorted(rows([10, 50, 20, 50, 90, 30]), key=lambda row: (row.need, -row.number))
    taken = take_fitting(waiting, [Shelf(2, 90), Shelf(3, 30)], [1, 2])
    assert [(row.number, shelf) for row, shelf in taken] == [(4, 0), (5, 1), (2, 1)]
    assert take_fitting(waiting, [Shelf(2, 90), Shelf(3, 9)], [0, 3]) == []  # nothing free, nothing that fits
    assert [row.number for row, _ in take_fitting(waiting, [Shelf(9, 90)], [9])] == [1, 3, 0]
    assert not waiting
