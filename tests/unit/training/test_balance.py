"""Which shares ranks get by how long they take, and when that changes."""

import pytest

from glm_accelerate.data.pack import Dealing
from glm_accelerate.parallel.place import Axes
from glm_accelerate.training.balance import chosen, shares_of, slowness

FOUR = Axes(data=4)
NOW = Dealing(0.001, moves=True)


def test_a_rank_is_compared_with_those_that_do_the_same_work() -> None:
    """The second stage has half the layers: it is not twice as fast."""
    axes = Axes(pipeline=2, data=2)
    assert slowness([2.0, 2.0, 1.0, 1.0], axes) == [1.0] * 4
    assert slowness([2.0, 2.0, 1.0, 3.0], axes) == [1.0, 1.0, 1.0, 3.0]


@pytest.mark.parametrize(
    ("axes", "slow", "shares"),
    [
        (FOUR, [1.0, 2.0, 1.0, 1.0], [1.0, 2.0, 1.0, 1.0]),
        (Axes(data=2, tensor=2), [1.0, 1.0, 1.0, 2.0], [1.0, 2.0]),
        (Axes(pipeline=2, data=2), [1.0, 1.0, 2.0, 1.0], [2.0, 1.0]),
        (Axes(data=4, context=2), [1.0, 2.0, 1.0, 1.0], [2.0, 2.0, 1.0, 1.0]),
    ],
)
def test_a_share_is_as_slow_as_the_slowest_of_its_ranks(
    axes: Axes, slow: list[float], shares: list[float]
) -> None:
    assert shares_of(slow, axes) == shares


def test_a_rank_at_half_its_speed_gets_half_a_share_and_its_whole_one_back() -> None:
    slowed = chosen(NOW, [1.0, 1.0, 2.0, 1.0], None, 1000, FOUR)
    assert slowed.speeds == (1.0, 1.0, 0.5, 1.0)
    assert chosen(slowed, [1.0, 1.0, 2.0, 1.0], None, 1000, FOUR) == slowed
    back = chosen(slowed, [1.0] * 4, None, 1000, FOUR)
    assert back.speeds == (1.0,) * 4
    assert chosen(back, [1.0, 1.0, 1e9, 1.0], None, 1000, FOUR).speeds[2] == 0.2  # never nothing


def test_noise_moves_nothing() -> None:
    assert chosen(NOW, [1.0, 1.05, 0.97, 1.0], 0.0012, 1000, FOUR) == NOW
    slowed = Dealing(0.001, (1.0, 1.0, 0.5, 1.0), moves=True)
    assert chosen(slowed, [1.0, 1.0, 1.9, 1.04], 0.0009, 1000, FOUR) == slowed


def test_a_factor_changes_where_it_matters() -> None:
    assert chosen(NOW, None, 0.002, 1000, FOUR).square == 0.002
    assert chosen(NOW, None, 0.002, 100, FOUR) == NOW  # of short samples it makes next to nothing
