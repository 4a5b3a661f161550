"""The order of samples is a function: nothing is lost, nothing depends on where a run was interrupted."""

from collections import Counter
from itertools import islice, pairwise

import numpy as np
import pytest

from glm_accelerate.data.order import Order
from glm_accelerate.runtime.errors import UserError


def order(count: int = 37, **changes: object) -> Order:
    settings: dict[str, object] = {"spans": ((0, count, 1.0),), "seed": 3, "step_samples": 5} | changes
    return Order(lengths=np.arange(1, count + 1, dtype=np.int32), **settings)  # type: ignore[arg-type]


def test_an_epoch_draws_each_sample_once() -> None:
    steps = order().epoch(0)
    assert [len(step) for step in steps] == [5] * 7 + [2]
    assert sorted(np.concatenate(steps)) == list(range(37))


def test_epochs_and_seeds_differ_and_repeat() -> None:
    first = np.concatenate(order().epoch(0))
    assert not np.array_equal(first, np.concatenate(order().epoch(1)))
    assert not np.array_equal(first, np.concatenate(order(seed=4).epoch(0)))
    assert np.array_equal(first, np.concatenate(order().epoch(0)))


def test_any_position_continues_the_same_stream() -> None:
    """Across the epoch's end too, where resumes usually break."""
    whole = [(number, epoch, tuple(drawn)) for number, epoch, drawn in islice(order().steps_from(0), 30)]
    assert [number for number, _, _ in whole] == list(range(1, 31))
    for position in (0, 1, 7, 8, 9, 15, 16, 23):
        rest = [(n, e, tuple(drawn)) for n, e, drawn in islice(order().steps_from(position), 30 - position)]
        assert rest == whole[position:]


def test_a_small_share_of_a_small_source_still_makes_epochs() -> None:
    tiny = order(1, spans=((0, 1, 0.3),))
    assert [(number, epoch) for number, epoch, _ in islice(tiny.steps_from(0), 2)] == [(1, 0), (2, 1)]


def test_weights_say_how_often_an_epoch_draws_a_source() -> None:
    weighted = order(spans=((0, 10, 2.0), (10, 30, 0.5), (30, 37, 1.0)))
    counts = Counter(int(number) for step in weighted.epoch(0) for number in step)
    assert all(counts[number] == 2 for number in range(10))
    assert sum(counts[number] for number in range(10, 30)) == 10
    assert all(counts[number] == 1 for number in range(30, 37))
    two_epochs = Counter(int(n) for epoch in (0, 1) for step in weighted.epoch(epoch) for n in step)
    assert all(two_epochs[number] == 1 for number in range(10, 30))  # the other half comes next


def test_steps_of_tokens() -> None:
    by_tokens = order(step_samples=None, step_tokens=60)
    for epoch in range(3):
        steps = by_tokens.epoch(epoch)
        assert sorted(np.concatenate(steps)) == list(range(37))
        sizes = [int(by_tokens.lengths[step].sum()) for step in steps]
        assert all(size <= 60 for size in sizes)
        for step, following in pairwise(steps):  # no step could have taken one more
            assert by_tokens.lengths[step].sum() + by_tokens.lengths[following[0]] > 60
    assert by_tokens.steps_in(3) == sum(len(by_tokens.epoch(epoch)) for epoch in range(3))


def test_a_sample_longer_than_a_step_is_a_step() -> None:
    lone = Order(np.array([5, 500, 5], dtype=np.int32), ((0, 3, 1.0),), 0, None, 20)
    assert sorted(np.concatenate(lone.epoch(0))) == [0, 1, 2]
    assert any(list(step) == [1] for step in lone.epoch(0))


def test_parts_of_an_epoch() -> None:
    assert order().steps_in(1) == 8
    assert order().steps_in(2.5) == 20
    assert order().steps_in(0.01) == 1


@pytest.mark.parametrize("weight", [1e9, float("inf")])
def test_weights_that_no_memory_holds_are_refused(weight: float) -> None:
    with pytest.raises(UserError, match=r"weights of data\.train make an epoch of .* samples \(lower them"):
        order(40, spans=((0, 3, 1.0), (3, 40, weight)))


def test_steps_of_very_many_epochs_are_not_counted_one_by_one() -> None:
    assert order().steps_in(1e6) == 8 * 10**6
    by_tokens = order(step_samples=None, step_tokens=60)
    counted = sum(len(by_tokens.epoch(epoch)) for epoch in range(1000))
    assert by_tokens.steps_in(1000) == counted
    assert by_tokens.steps_in(1e6) == counted * 1000
