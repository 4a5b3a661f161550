from dataclasses import replace

import numpy as np
import pytest

from glm_accelerate.data.order import Order
from glm_accelerate.memory.job import Job
from glm_accelerate.memory.weights import weights_of
from glm_accelerate.models.sizes import Sizes
from glm_accelerate.plan.cost import (
    Speed,
    Trained,
    Work,
    pairs,
    run_flops,
    run_seconds,
    step_flops,
    trained_weights,
)
from glm_accelerate.plan.ground import Load

NINE = Sizes(151552, 4096, 13696, 40, 32, 2, 128, 1e-5, 1e4, 64, True, 131072, sandwich=True)
WORK = Work(tokens=1e7, pairs=1e10, targets=5e6, steps=100)
CARD = Speed(4e14, 3e12, "")


def seconds(**changes: object) -> float:
    job = Job(NINE, device="cuda", form="triton", pass_tokens=8192)
    return run_seconds(replace(job, **changes), WORK, CARD)


def test_what_saves_memory_takes_time_as_it_should() -> None:
    plain = seconds()
    assert 1.3 < seconds(recompute="blocks") / plain < 1.55  # 4N becomes 6N, but for the head
    assert 1.2 < seconds(method="full", recompute="blocks") / seconds(method="full") < 1.4
    assert plain < seconds(base="nf4") < 1.3 * plain
    assert plain < seconds(pass_tokens=512)
    assert seconds(pass_tokens=256, offload=frozenset({"weights"})) > 2 * plain
    assert seconds(method="full", offload=frozenset({"optimizer"})) > seconds(method="full")
    assert seconds(ranks=2) < plain
    assert seconds(ranks=2, shards=2) >= seconds(ranks=2)


def test_a_run_is_its_steps() -> None:
    lengths = [100, 200, 300]
    work = Work(600.0, pairs(lengths), 300.0, 1)
    assert run_flops(Job(NINE, method="full"), work) == step_flops(NINE, Trained("full"), lengths, 300)


@pytest.mark.parametrize("method", ["full", "lora", "prefix", "freeze"])
def test_what_trains_is_counted_as_the_estimate_does(method: str) -> None:
    job = Job(NINE, method=method)
    counted = sum(weight.part(1) for weight in weights_of(job) if weight.trains)
    assert trained_weights(job) == pytest.approx(counted, rel=0.01)


def test_padding_is_counted_in_positions() -> None:
    lengths = np.array([64, 128, 256, 512] * 8, dtype=np.int32)
    order = Order(lengths, ((0, 32, 1.0),), 0, step_samples=8)
    load = Load(order, lengths // 2, steps=8, steps_per_epoch=4)
    assert load.padding("pack", 1024) == 1
    assert 1 <= load.padding("bucket", 1024) < load.padding("pad", 1024) < 8
    assert load.longest == 512
    assert load.work().tokens == 2 * lengths.sum()
    assert load.largest("pack", 1024, 1).positions == 1024


def test_a_source_counts_as_often_as_it_is_drawn() -> None:
    """What a plan counts is what the steps of many epochs hold."""
    lengths = np.random.default_rng(0).integers(20, 900, 300).astype(np.int32)
    spans = ((0, 100, 0.25), (100, 200, 3.0), (200, 290, 1.5), (290, 300, 0.001))
    order = Order(lengths, spans, 0, step_samples=10)
    per_epoch = len(order.epoch(0))
    work = Load(order, lengths // 3, 40 * per_epoch, per_epoch).work()
    drawn = [int(sample) for epoch in range(40) for step in order.epoch(epoch) for sample in step]
    assert work.tokens == pytest.approx(int(lengths[drawn].sum()), rel=0.01)
    assert work.pairs == pytest.approx(pairs(lengths[drawn]), rel=0.01)
    assert work.targets == pytest.approx(int((lengths // 3)[drawn].sum()), rel=0.01)


def test_ranks_wait_for_the_one_with_the_most() -> None:
    lengths = np.array([640, 64, 64, 64], dtype=np.int32)
    load = Load(Order(lengths, ((0, 4, 1.0),), 0, 4, None), lengths, 1, 1)
    assert load.padding("pack", 1024, 2) == 2 * 640 / 832


def test_ranks_on_a_cpu_share_its_cores_and_carry_what_they_send() -> None:
    job, core = Job(NINE, method="full", device="cpu", pass_tokens=8192), Speed(2e11, 2e10, "")
    one, two = run_seconds(job, WORK, core), run_seconds(replace(job, ranks=2), WORK, core)
    assert one / 2 < two < one
    assert run_seconds(replace(job, ranks=2), WORK, core.shared(0.5)) > one


def test_the_head_has_a_speed_of_its_own() -> None:
    job = Job(NINE, device="cpu", pass_tokens=8192)
    plain, slow = (run_seconds(job, WORK, replace(CARD, head=head)) for head in (None, 1e14))
    blocks = run_seconds(job, replace(WORK, targets=0.0), CARD)
    assert slow - blocks == pytest.approx(4 * (plain - blocks))
