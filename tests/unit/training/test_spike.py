"""When a loss counts as jumped, when as back, and that history alone decides."""

from functools import reduce
from itertools import chain, repeat

import pytest

from glm_accelerate.training.spike import CALM, FACTOR, LEAST, Level, follow


def after(losses: "chain[float] | list[float]") -> Level:
    return reduce(lambda level, said: follow(level, *said), enumerate(losses, 1), Level())


def test_no_losses_no_level() -> None:
    assert after([]) == Level()
    assert after([2.0]) == Level(2.0)


@pytest.mark.parametrize("loss", [0.5, 1.9, 2.0, 2.0 * FACTOR])
def test_a_loss_near_the_usual_one_moves_it(loss: float) -> None:
    level = after(chain(repeat(2.0, 20), [loss]))
    assert (level.jumped, level.calm) == (None, 0)
    assert level.usual == pytest.approx(0.9 * 2.0 + 0.1 * loss)


def test_ten_times_the_usual_loss_is_a_jump_and_moves_nothing() -> None:
    level = after(chain(repeat(2.0, 20), [20.0, 30.0, 1.0, 25.0]))
    assert level == Level(pytest.approx(2.0), jumped=21, calm=0)


def test_it_is_back_after_so_many_steps_in_a_row_and_not_before() -> None:
    spike = [*repeat(2.0, 20), 20.0, *repeat(2.0, CALM - 1)]
    assert after(spike) == Level(pytest.approx(2.0), jumped=21, calm=CALM - 1)
    assert after([*spike, 20.0]).calm == 0
    assert after([*spike, 2.0]) == Level(pytest.approx(2.0))


def test_a_hard_sample_where_all_is_learnt_is_no_jump() -> None:
    assert after(chain(repeat(0.001, 20), [FACTOR * LEAST])).jumped is None
    assert after(chain(repeat(0.001, 20), [1.1 * FACTOR * LEAST])).jumped == 21


def test_a_loss_that_grows_slowly_is_followed() -> None:
    assert after([1.05**step for step in range(200)]).jumped is None
