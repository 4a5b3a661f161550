"""The cost of a pass from three that were timed."""

import numpy as np
import pytest

from glm_accelerate.data.types import Batch, Piece
from glm_accelerate.training.pass_cost import PassCost


def seconds(lengths: list[int]) -> float:
    """On a device that takes 3 ms for a pass, 20 us a token, 5 ns a token's square."""
    return 3e-3 + 2e-5 * sum(lengths) + 5e-9 * sum(length**2 for length in lengths)


def test_the_three_parts_are_found_again() -> None:
    found = PassCost.fitted(4096, seconds([4096]), seconds([512] * 8), seconds([64]))
    assert found is not None
    assert found.started == pytest.approx(150, rel=0.01)
    assert found.square == pytest.approx(2.5e-4, rel=0.01)


def test_what_says_nothing_is_no_cost() -> None:
    assert PassCost.fitted(4096, 1.0, 1.0, 1.0) is None
    found = PassCost.fitted(4096, 0.9, 1.0, 0.1)  # the whole document was quicker than its parts
    assert found is not None
    assert found.square == 0.0


def test_pieces_see_their_document() -> None:
    """Two ranks have half of what the document costs each."""
    tokens = np.zeros((1, 100), np.int64)
    pieces = Piece(0, 0, 50, 200), Piece(0, 150, 200, 200)
    shared = Batch(tokens, tokens, ((50, 50),), 1, 100, 0, pieces)
    whole = Batch(tokens, tokens, ((200,),), 1, 200, 0)
    assert 2 * PassCost(0.0, 0.01).of(shared) == pytest.approx(PassCost(0.0, 0.01).of(whole))
