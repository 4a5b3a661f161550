"""The largest passes, found from lengths, against every pass that the pipeline really makes."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest

from glm_accelerate.data.largest import MOST_LOOKED_AT, find_largest, largest_steps
from glm_accelerate.data.order import Order
from glm_accelerate.data.pack import ARRANGE, widest_for
from glm_accelerate.data.pipeline import steps
from glm_accelerate.data.types import IGNORED, FilePlace, Sample


@dataclass(frozen=True)
class Made:
    """Samples of long-tailed lengths, a third of whose tokens are learnt."""

    lengths: np.ndarray
    seed: int

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Sample:
        draw = np.random.default_rng([self.seed, number])
        length = int(self.lengths[number])
        targets = draw.random(length) < 1 / 3
        return Sample(draw.integers(0, 99, length).astype(np.int32), targets, FilePlace("made", number + 1))

    @property
    def targets(self) -> np.ndarray:
        return np.array([self[number].targets.sum() for number in range(len(self))], np.int32)


def made(seed: int, count: int = 60) -> Made:
    drawn = np.random.default_rng(seed).lognormal(4.5, 1.0, count)
    return Made(np.clip(drawn, 3, 700).astype(np.int32), seed)


@pytest.mark.parametrize("batching", ["pack", "bucket", "pad"])
@pytest.mark.parametrize("micro_tokens", [100, 512, 4096])
@pytest.mark.parametrize(("step_samples", "step_tokens"), [(1, None), (7, None), (None, 900)])
@pytest.mark.parametrize(("ranks", "context"), [(1, 1), (3, 1), (4, 2)])
def test_no_pass_of_the_run_is_larger(
    batching: str,
    micro_tokens: int,
    step_samples: int | None,
    step_tokens: int | None,
    ranks: int,
    context: int,
) -> None:
    samples = made(seed=micro_tokens + ranks)
    order = Order(samples.lengths, ((0, len(samples), 1.0),), 3, step_samples, step_tokens)
    total, position = 2 * len(order.epoch(0)) - 1, 2
    told = {"batching": batching, "micro_tokens": micro_tokens, "position": position, "total": total}
    told["context"] = context
    found = find_largest(order, samples.targets, **told, ranks=ranks)
    passes = [
        (step.number, len(step.batches), batch)
        for rank in range(ranks)
        for step in steps(samples, order, **told, rank=rank, ranks=ranks)
        for batch in step.batches
    ]
    assert found.positions == max(batch.tokens_RT.size for *_, batch in passes)
    most = max(count for _, count, _ in passes)
    assert found.count == min(2, most)
    assert find_largest(order, samples.targets, **told, ranks=ranks, matter=4).count == min(4, most)
    assert found.targets >= max(batch.targets for *_, batch in passes)
    gathered = [sum(piece.start for piece in batch.pieces) for *_, batch in passes]
    assert found.gathered == max(gathered)
    assert (found.gathered > 0) == (context > 1 and micro_tokens < 4096)
    after = order.steps_from(position)
    drawn = [next(after)[2] for _ in range(total - position)]
    assert found.longest == max(int(samples.lengths[each].max()) for each in drawn)

    rehearsed = largest_steps(samples, found)
    seen = [sum(piece.start for piece in batch.pieces) for step in rehearsed for batch in step.batches]
    assert max(seen) == found.gathered
    widest = max(rehearsed, key=lambda step: step.batches[0].tokens_RT.size)
    assert any(
        step.number == widest.number and batch.tokens_RT.size == found.positions
        for step in rehearsed
        for batch in step.batches
    )
    real = {(number, batch.tokens_RT.tobytes()) for number, _, batch in passes}
    for step in rehearsed:
        assert len(step.batches) == found.count
        assert step.targets == sum(batch.targets for batch in step.batches) > 0
        for batch in step.batches:
            assert (step.number, batch.tokens_RT.tobytes()) in real
            assert batch.targets == min(found.targets, batch.tokens_RT.size)
            assert batch.targets == (batch.labels_RT != IGNORED).sum()
    assert max(len(samples[number]) for step in rehearsed for number in step.numbers) == found.longest


@pytest.mark.parametrize("batching", ["pack", "bucket", "pad"])
@pytest.mark.parametrize("capacity", [64, 100, 1000, 1024])
def test_the_bound_of_a_pass_holds(batching: str, capacity: int) -> None:
    for seed in range(40):
        lengths = made(seed, count=1 + seed % 9).lengths.tolist()
        most = max(arrangement.area for arrangement in ARRANGE[batching](lengths, capacity))
        assert most <= widest_for(max(lengths), capacity)


def test_what_is_added_to_the_labels_is_only_where_nothing_was_learnt() -> None:
    samples = made(seed=1, count=6)
    order = Order(samples.lengths, ((0, 6, 1.0),), 0, step_samples=2)
    found = find_largest(order, samples.targets, batching="pack", micro_tokens=64, position=0, total=3)
    for step in largest_steps(samples, found):
        taken = [samples[number] for number in step.numbers]
        plain = next(one for one in found.passes if one.step == step.number).arrangement
        for batch in step.batches:
            (row,) = plain.rows
            learnt = np.concatenate([taken[index].targets[1:] for index in row])
            starts = np.cumsum([0, *(len(taken[index]) for index in row)])
            places = np.concatenate([np.arange(a, b - 1) for a, b in pairwise(starts)])[learnt]
            following = np.concatenate([taken[index].tokens[1:] for index in row])[learnt]
            assert (batch.labels_RT[0, places] == following).all()


def test_of_a_run_without_end_the_first_steps_are_looked_at() -> None:
    samples = made(seed=1)
    order = Order(samples.lengths, ((0, len(samples), 1.0),), 3, 7)
    told = {"batching": "pack", "micro_tokens": 512, "position": 5}
    found = find_largest(order, samples.targets, **told, total=10**9)
    assert found.looked_at == 5 + MOST_LOOKED_AT
    assert found.longest == samples.lengths.max()
    assert find_largest(order, samples.targets, **told, total=50).looked_at == 50
