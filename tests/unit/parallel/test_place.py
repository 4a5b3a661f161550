"""Ranks and coordinates."""

import pytest

from glm_accelerate.parallel.place import LOSS, ORDER, SAMPLES, TENSOR, Axes

MANY = Axes(pipeline=2, data=3, shard=2, tensor=4, query=2, context=3)


def test_every_rank_has_its_own_coordinates() -> None:
    places = [tuple(MANY.coordinates(rank)[name] for name in ORDER) for rank in range(96)]
    assert places == sorted(set(places))  # the last axis changes fastest
    assert MANY.count(*ORDER) == 96
    with pytest.raises(AssertionError, match="96 ranks"):
        MANY.coordinates(96)


@pytest.mark.parametrize("names", [("tensor",), ("data", "shard"), ("pipeline", "tensor"), ORDER, ()])
def test_groups_divide_the_ranks_and_an_index_is_the_place_in_its_group(names: tuple[str, ...]) -> None:
    groups = MANY.groups(*names)
    assert sorted(rank for group in groups for rank in group) == list(range(96))
    for group in groups:
        assert [MANY.index(rank, *names) for rank in group] == list(range(MANY.count(*names)))
        rest = [name for name in ORDER if name not in names]
        assert len({MANY.index(rank, *rest) for rank in group}) == 1


def test_neighbours_share_the_innermost_axis() -> None:
    assert MANY.groups("tensor", "query")[0] == list(range(8))


def test_ranks_that_take_the_same_samples_learn_the_same_loss_once() -> None:
    """Along `tensor` all have all of a sample's loss; along the pipeline, parts of it."""
    assert set(SAMPLES) < set(LOSS)
    assert set(ORDER) - set(LOSS) == set(TENSOR)


def test_ranks_that_share_a_document_are_neighbours_among_those_that_take_other_samples() -> None:
    groups = MANY.sharing()
    assert sorted(rank for group in groups for rank in group) == list(range(96))
    for group in groups:
        first, *_ = (MANY.index(rank, *SAMPLES) for rank in group)
        assert [MANY.index(rank, *SAMPLES) for rank in group] == [first, first + 1, first + 2]
        assert first % 3 == 0
        rest = [name for name in ORDER if name not in SAMPLES]
        assert len({MANY.index(rank, *rest) for rank in group}) == 1
