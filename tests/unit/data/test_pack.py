"""Rows: nothing lost, nothing over the capacity, as little padding as promised."""

import random
from itertools import zip_longest

import numpy as np
import pytest

from glm_accelerate.data.order import Order
from glm_accelerate.data.pack import ARRANGE, BY_TOKENS, Arrangement, Dealing, arranged, deal, pack
from glm_accelerate.data.pipeline import collate, steps
from glm_accelerate.data.types import IGNORED, FilePlace, Piece, Sample, Step


def long_tailed(count: int, seed: int) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(4.8, 1.0, count)
    return [int(length) for length in np.clip(drawn, 4, 1024)]


@pytest.mark.parametrize("batching", ["pack", "bucket", "pad"])
@pytest.mark.parametrize("count", [1, 4, 16, 257])
@pytest.mark.parametrize("capacity", [64, 1024, 4096])
def test_every_sample_once_and_within_the_capacity(batching: str, count: int, capacity: int) -> None:
    lengths = long_tailed(count, seed=count)
    made = ARRANGE[batching](lengths, capacity)
    assert sorted(index for a in made for row in a.rows for index in row) == list(range(count))
    for arrangement in made:
        assert all(sum(lengths[i] for i in row) <= arrangement.width for row in arrangement.rows)
        longest = max(lengths[i] for row in arrangement.rows for i in row)
        assert arrangement.area <= max(capacity, longest + 127, -(-max(lengths) // 64) * 64)


def test_a_small_step_is_one_flat_row() -> None:
    (only,) = pack([100, 300, 7, 80], 4096)
    assert only == Arrangement(((0, 1, 2, 3),), 512)


def test_full_rows_are_constant_and_nearly_full() -> None:
    """The promise of best fit: rows of one shape, and over 97 % of them useful on long-tailed lengths."""
    lengths = long_tailed(512, seed=5)
    made = pack(lengths, 2048)
    assert sorted({a.width for a in made})[-1] == 2048
    assert sum(a.width != 2048 for a in made) <= 1
    assert sum(lengths) / sum(a.area for a in made) > 0.97


def best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """By looking at every row for each sample."""
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        free = [capacity - sum(lengths[one] for one in row) for row in rows]
        fits = [row for row in range(len(rows)) if free[row] >= lengths[index]]
        if fits:
            rows[min(fits, key=lambda row: free[row])].append(index)
        else:
            rows.append([index])
    return [sorted(row) for row in rows]


@pytest.mark.parametrize("seed", range(5))
def test_the_fullest_row_that_takes_it(seed: int) -> None:
    lengths = long_tailed(200, seed) + [64] * 20
    made = pack(lengths, 1024)
    assert [list(row) for a in made for row in a.rows] == best_fit(lengths, 1024)
    free = [1024 - sum(lengths[index] for index in a.rows[0]) for a in made]
    assert [a.width < 1024 for a in made] == [place == free.index(max(free)) for place in range(len(made))]


def test_buckets_use_few_widths() -> None:
    widths = {a.width for a in ARRANGE["bucket"](long_tailed(2000, seed=6), 4096)}
    assert len(widths) <= 12
    assert all(width % 64 == 0 for width in widths)


ROW = Arrangement(((0, 1),), 64)


def sample(*tokens: int, learnt: str) -> Sample:
    return Sample(np.array(tokens, dtype=np.int32), np.array([c == "x" for c in learnt]), FilePlace("t", 1))


def test_labels_are_the_next_token_of_the_same_document() -> None:
    batch = collate(ROW, [sample(5, 6, 7, learnt="..x"), sample(8, 9, learnt=".x")])
    assert batch.tokens_RT.shape == (1, 64)
    assert batch.labels_RT[0, :6].tolist() == [IGNORED, 7, IGNORED, 9, IGNORED, IGNORED]
    assert (batch.labels_RT[0, 5:] == IGNORED).all()
    assert batch.documents == ((3, 2, 59),)
    assert (batch.samples, batch.tokens, batch.targets) == (2, 5, 2)


def test_the_first_token_of_a_document_is_never_predicted() -> None:
    """Even where it is a target: nothing stands before it but another document."""
    batch = collate(ROW, [sample(5, 6, learnt="xx"), sample(8, 9, learnt="xx")])
    assert batch.labels_RT[0, :4].tolist() == [6, IGNORED, 9, IGNORED]


def test_rectangles_hold_one_document_a_row() -> None:
    batch = collate(Arrangement(((0,), (1,)), 4), [sample(5, 6, 7, learnt=".xx"), sample(8, 9, learnt=".x")])
    assert batch.documents == ((4,), (4,))
    assert batch.labels_RT.tolist() == [[6, 7, IGNORED, IGNORED], [9, IGNORED, IGNORED, IGNORED]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_everything_is_dealt_once_and_evenly(ranks: int) -> None:
    drawn = random.Random(ranks)
    for _ in range(200):
        lengths = [drawn.randint(1, 1000) for _ in range(drawn.randint(1, 40))]
        shares = deal(lengths, ranks)
        assert sorted(place for share in shares for place in share) == list(range(len(lengths)))
        loads = [sum(lengths[place] for place in share) for share in shares]
        assert max(loads) <= sum(lengths) / ranks + max(lengths)  # no rank waits for more than one sample
        assert all(share == sorted(share) for share in shares)
    assert deal([5, 5, 5], 1) == [[0, 1, 2]]


def test_a_long_sample_weighs_more_than_its_tokens() -> None:
    lengths = [8, *[2] * 12]
    assert [len(share) for share in deal(lengths, 2)] == [5, 8]
    shares = deal(lengths, 2, lambda length: length + length**2)
    assert shares == [[0], list(range(1, 13))]


def test_a_slow_rank_gets_a_smaller_share() -> None:
    lengths = [7, 3, 5, 8, 2, 9, 4, 6, 1, 5] * 6
    shares = deal(lengths, 3, speeds=(1.0, 1.0, 0.5))
    assert sorted(place for share in shares for place in share) == list(range(60))
    times = [
        sum(lengths[place] for place in share) / speed
        for share, speed in zip(shares, (1, 1, 0.5), strict=True)
    ]
    assert max(times) < 1.03 * sum(lengths) / 2.5
    assert deal(lengths, 3, speeds=(2.0, 2.0, 2.0)) == deal(lengths, 3)


def waited(lengths: list[int], ranks: int, true: Dealing, way: Dealing) -> float:
    """How long a step takes whose ranks wait for each other in every pass."""
    every = arranged(lengths, "pack", 512, ranks, dealing=way)
    assert sorted(at for own in every for one in own for at in one.places) == list(range(len(lengths)))
    assert max(one.width for own in every for one in own) <= 512
    times = [
        [sum(true.cost(lengths[at]) for at in one.places) / speed for one in own]
        for own, speed in zip(every, true.speeds or [1.0] * ranks, strict=True)
    ]
    return sum(map(max, zip_longest(*times, fillvalue=0.0)))


@pytest.mark.parametrize(("speeds", "most"), [((), 0.99), ((1.0, 0.5, 1.0, 1.0), 0.75)])
def test_ranks_that_wait_in_every_pass_have_passes_of_equal_cost(
    speeds: tuple[float, ...], most: float
) -> None:
    drawn, dealing = random.Random(1), Dealing(0.01, speeds, together=True)
    shares = list[float]()
    for _ in range(20):
        lengths = [min(512, 1 + int(drawn.lognormvariate(4, 1.2))) for _ in range(80)]
        shares.append(waited(lengths, 4, dealing, dealing) / waited(lengths, 4, dealing, BY_TOKENS))
    assert sum(shares) < most * 20


def test_a_rank_may_have_nothing() -> None:
    assert arranged([100], "pack", 512, 3, dealing=Dealing(0.1, together=True))[1:] == [[], []]


def taken(ranks: int, batching: str) -> list[list[Step]]:
    generator = np.random.default_rng(0)
    samples = [
        Sample(np.arange(n, dtype=np.int32), generator.random(n) < 0.5, FilePlace("made", 1))
        for n in generator.integers(2, 90, 23)
    ]
    order = Order(np.array([len(sample) for sample in samples], np.int32), ((0, 23, 1.0),), 7, step_samples=5)
    return [
        list(
            steps(
                samples,
                order,
                batching=batching,
                micro_tokens=128,
                position=0,
                total=9,
                rank=rank,
                ranks=ranks,
            )
        )
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("batching", ["pack", "bucket", "pad"])
@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_ranks_hold_together_what_one_holds(batching: str, ranks: int) -> None:
    (alone,) = taken(1, batching)
    together = taken(ranks, batching)
    for number, step in enumerate(alone):
        shares = [steps_of_rank[number] for steps_of_rank in together]
        assert {share.numbers for share in shares} == {step.numbers}
        assert {(share.tokens, share.targets) for share in shares} == {(step.tokens, step.targets)}
        assert len({len(share.batches) for share in shares}) == 1  # a divided model is run by all at once
        learnt = [batch.targets for share in shares for batch in share.batches]
        assert sum(learnt) == step.targets == sum(batch.targets for batch in step.batches)
        assert sum(batch.samples for share in shares for batch in share.batches) == len(step.numbers)


@pytest.mark.parametrize("batching", ["pack", "bucket", "pad"])
@pytest.mark.parametrize("context", [2, 3])
def test_what_is_longer_than_a_pass_is_shared_and_all_else_whole(batching: str, context: int) -> None:
    drawn, ranks = random.Random(context), 2 * context
    for _ in range(100):
        lengths = [drawn.choice((drawn.randint(1, 128), drawn.randint(129, 900))) for _ in range(12)]
        passes = arranged(lengths, batching, 128, ranks, context)
        pieces = [piece for own in passes for one in own for piece in one.pieces]
        for place, length in enumerate(lengths):
            spans = sorted((piece.start, piece.stop) for piece in pieces if piece.place == place)
            rows = [row for own in passes for one in own for row in one.rows if place in row]
            if length <= 128:
                assert (spans, len(rows)) == ([], 1)
                continue
            assert rows == []
            assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
            assert spans[-1][1] == length
            sizes = [stop - start for start, stop in spans]
            assert len(sizes) == 2 * context
            assert max(sizes) - min(sizes) <= 1
        for group in range(2):  # neighbours meet in passes of the same number
            own = passes[group * context : (group + 1) * context]
            met = [[[piece.place for piece in one.pieces] for one in each if one.pieces] for each in own]
            assert met == met[:1] * context
            for number in range(len(met[0])):
                seen = {each[number].gathered - own[0][number].gathered for each in own}
                assert max(map(abs, seen)) <= 2 * len(
                    met[0][number]
                )  # as many keys for each, but for odd ones
        for one in (one for own in passes for one in own):
            tokens = sum(map(len, one.pieces)) + sum(lengths[place] for row in one.rows for place in row)
            assert tokens <= one.area


def test_a_piece_ends_with_the_label_that_the_next_begins_with() -> None:
    one = sample(*range(10, 19), learnt="..xxxxxxx")
    pieces = (Piece(0, 0, 3, 9), Piece(0, 6, 9, 9))
    batch = collate(Arrangement(((1,),), 64, pieces), [one, sample(5, 6, learnt=".x")])
    assert batch.tokens_RT[0, :8].tolist() == [10, 11, 12, 16, 17, 18, 5, 6]
    assert batch.labels_RT[0, :8].tolist() == [IGNORED, 12, 13, 17, 18, IGNORED, 6, IGNORED]
    assert batch.documents == ((3, 3, 2, 56),)
    assert (batch.samples, batch.tokens, batch.targets) == (2, 8, 5)
