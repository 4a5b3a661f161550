"""The time of a step follows from counts: what each axis sends, what is hidden, and who idles."""

from dataclasses import replace

import pytest

from glm_accelerate.memory.job import Job
from glm_accelerate.models.sizes import Sizes
from glm_accelerate.plan.step_time import (
    CARRIED,
    Machines,
    RankLayout,
    Software,
    StepTime,
    Task,
    passes_of,
    step_time,
)

NINE = Sizes(151552, 4096, 13696, 40, 32, 2, 128, 1e-5, 1e4, 64, True, 131072, sandwich=True)
A100 = Machines(312e12, 0.75, 2.039e12, 300e9, 200e9, 8)
FULL = Task(Job(NINE, method="full"), 2.0**20, 2.0**31, 2.0**20)
LORA = replace(FULL, job=Job(NINE))


def seconds(layout: RankLayout, task: Task = FULL, machines: Machines = A100) -> float:
    return step_time(task, layout, machines).seconds


def waited(found: StepTime) -> dict[str, float]:
    return {sent.axis: sent.waited for sent in found.traffic}


def test_one_device_computes_at_the_speed_it_reaches() -> None:
    found = step_time(FULL, RankLayout(), A100)
    products = FULL.flops / (A100.products * A100.reached)
    assert products < found.seconds < 1.3 * products  # norms, attention and the update come on top
    assert found.traffic == ()
    assert found.bubble == pytest.approx(0, abs=1e-9)
    assert seconds(RankLayout(), LORA) < 0.75 * found.seconds  # 4N for 6N
    assert 1.2 < seconds(RankLayout(recompute=1.0)) / found.seconds < 1.34


def test_what_ranks_of_a_ring_receive() -> None:
    """Of S among n each receives S (n - 1) / n over its own link; over nodes, S less what is here."""
    assert A100.carry(8e9, 8, 1) == (False, pytest.approx(7e9 / 300e9 / CARRIED))
    assert A100.carry(8e9, 2, 4) == (False, pytest.approx(4e9 / 300e9 / CARRIED))
    assert A100.carry(8e9, 16, 1) == (True, pytest.approx(7.5e9 / 300e9 / CARRIED))  # NVLink is the slower
    slow = replace(A100, network=1e11)
    assert slow.carry(8e9, 16, 1) == (True, pytest.approx(4e9 / 1e11 / CARRIED))
    assert A100.carry(8e9, 2, 8) == (
        True,
        pytest.approx(4e9 / 25e9 / CARRIED),
    )  # eight pairs share the network


def test_products_that_ranks_share_are_summed_over_their_link() -> None:
    near = step_time(FULL, RankLayout(tensor=8), A100)
    slow = step_time(FULL, RankLayout(tensor=8), replace(A100, inside=16e9))
    sent = {one.axis: one for one in near.traffic}["tensor"]
    width_bytes = FULL.tokens * NINE.width * 2
    assert sent.bytes == pytest.approx(
        NINE.layers * 4 * 2 * width_bytes * 7 / 8
    )  # two sums each way, twice round
    assert not sent.network
    assert slow.seconds - near.seconds == pytest.approx(waited(slow)["tensor"] - waited(near)["tensor"])
    assert waited(slow)["tensor"] > 10 * waited(near)["tensor"]


def test_gathered_weights_hide_behind_computing_and_then_do_not() -> None:
    assert waited(step_time(FULL, RankLayout(shard=8, micro_tokens=8192), A100))["shard"] == 0
    poor = step_time(FULL, RankLayout(shard=16, micro_tokens=2048), replace(A100, network=1.25e10))
    assert waited(poor)["shard"] > 0.5 * poor.seconds
    assert {one.axis: one.network for one in poor.traffic}["shard"]


def test_copies_sum_their_gradients_once_a_step_and_adapters_hardly_send() -> None:
    full, lora = (step_time(task, RankLayout(data=8), A100) for task in (FULL, LORA))
    assert {one.axis for one in full.traffic} == {"data"}
    assert full.traffic[0].bytes == pytest.approx(9.4e9 * 4 * 2 * 7 / 8, rel=0.01)
    assert lora.traffic[0].bytes < full.traffic[0].bytes / 100


def test_a_pipeline_idles_by_the_formula_and_an_interleaved_one_less() -> None:
    layout = RankLayout(pipeline=4, micro_tokens=2**20 // 16)
    found = step_time(FULL, layout, A100)
    assert found.bubble / (found.seconds - found.update) == pytest.approx(3 / 19, rel=0.1)
    assert sum(found.stages) == NINE.layers
    assert found.stages[-1] < found.stages[0]  # the head counts
    assert step_time(FULL, replace(layout, chunks=2), A100).bubble < 0.6 * found.bubble
    fewer = step_time(FULL, replace(layout, micro_tokens=2**20 // 4), A100)
    assert fewer.bubble > 2 * found.bubble


def test_long_pipelines_need_not_be_played_through() -> None:
    """Beyond four times as many passes as stages each adds what the slowest stage takes."""
    layout = RankLayout(pipeline=4)
    short, long = (
        step_time(replace(FULL, tokens=2048.0 * n, pairs=2.0**21 * n, targets=2048.0 * n), layout, A100)
        for n in (40, 80)
    )
    slowest = (long.seconds - short.seconds) / 40
    assert long.seconds - long.update == pytest.approx(slowest * 80 + long.bubble)
    assert long.bubble == pytest.approx(short.bubble)


def test_ranks_of_a_context_share_a_pass() -> None:
    shared = RankLayout(context=4, micro_tokens=2048)
    assert passes_of(FULL, shared) == passes_of(FULL, RankLayout(micro_tokens=8192))
    found = step_time(FULL, shared, A100)
    assert found.seconds < seconds(RankLayout(micro_tokens=8192)) / 3
    assert waited(found)["context"] > 0
    assert waited(found)["data"] > 0  # each has gradients of its own tokens


def test_other_software_reads_and_sends_more() -> None:
    plain = seconds(RankLayout(tensor=8))
    assert step_time(FULL, RankLayout(tensor=8), A100, Software(elementwise=3)).seconds > plain
    assert step_time(FULL, RankLayout(tensor=8), A100, Software(scores=13)).seconds > plain
    assert step_time(FULL, RankLayout(tensor=8), A100, Software()).seconds > plain


def test_frozen_layers_have_no_backward_pass() -> None:
    freeze = replace(FULL, job=Job(NINE, method="freeze", last=2))
    assert seconds(RankLayout(), freeze) < 0.45 * seconds(RankLayout())
    cut = step_time(freeze, RankLayout(pipeline=2), A100).stages
    assert cut[0] > cut[1]  # the last layers are the dear ones


def test_packed_weights_are_unpacked_in_each_pass() -> None:
    packed = replace(LORA, job=Job(NINE, base="nf4"))
    assert seconds(RankLayout(), packed) > 1.03 * seconds(RankLayout(), LORA)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="40 layers are not 41 stages"):
        step_time(FULL, RankLayout(pipeline=41), A100)
