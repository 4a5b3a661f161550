"""Samples dealt to ranks: every one once, loads alike, and the same for whoever asks."""

import random

import numpy as np
import pytest

from glm_accelerate.data.deal import deal
from glm_accelerate.data.order import Order
from glm_accelerate.data.pipeline import steps
from glm_accelerate.data.types import FilePlace, Sample, Step


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
