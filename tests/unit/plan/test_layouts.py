"""Layouts of clusters that people have, from sizes and lengths alone."""

from dataclasses import replace

import numpy as np
import pytest

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.order import Order
from glm_accelerate.memory.job import Job
from glm_accelerate.models.sizes import Sizes
from glm_accelerate.plan.cost import speed_of
from glm_accelerate.plan.ground import Load
from glm_accelerate.plan.hardware import as_hardware, find_device
from glm_accelerate.plan.layouts import Cluster, LayoutComparison, compare_layouts
from glm_accelerate.plan.levers import Setting
from glm_accelerate.plan.step_time import RankLayout
from glm_accelerate.plan.weigh import Weighed, weigh
from glm_accelerate.runtime.errors import UserError

NINE = Sizes(151552, 4096, 13696, 40, 32, 2, 128, 1e-5, 1e4, 64, True, 131072, sandwich=True)
THIRTY_TWO = Sizes(151552, 6144, 23040, 61, 48, 2, 128, 1e-5, 1e4, 64, False, 131072, sandwich=True)


def weighed(
    sizes: Sizes, gpu: str, gpus: int, method: str = "full", longest: int = 4096, **memory: str
) -> tuple[RunConfig, Weighed]:
    """Of steps of 64 samples, all ranks data parallel."""
    lengths = np.random.default_rng(0).lognormal(6.5, 0.7, 1024).clip(64, longest).astype(np.int32)
    lengths[0] = longest
    load = Load(Order(lengths, ((0, 1024, 1.0),), 0, 64), lengths // 2, 32, 16)
    config = RunConfig.model_validate(
        {"model": {"path": "x"}, "data": {"train": "x"}, "adapt": {"method": method}, "memory": memory}
    )
    hardware = as_hardware(find_device(gpu), gpus)
    shards = gpus if method == "full" else 1
    job = Job(sizes, method=method, device="cuda", form="triton", ranks=gpus, shards=shards)
    setting = Setting(job, "pack", max(4096, longest))
    return config, weigh(config, setting, load, hardware, speed_of(hardware, "bfloat16"))


def compared(
    sizes: Sizes, gpu: str, gpus: int, nodes: int = 1, method: str = "full", **more: float
) -> LayoutComparison:
    longest = int(more.pop("longest", 4096))
    cluster = Cluster(find_device(gpu), gpus, nodes, **more)
    return compare_layouts(*weighed(sizes, gpu, gpus, method, longest), sizes, cluster)


def test_the_best_is_the_fastest_that_fits_and_all_divisions_are_there() -> None:
    found = compared(NINE, "A100 80GB", 8)
    times = [one.time.seconds for one in found.fitting]
    assert times == sorted(times)
    assert all(one.needed <= one.room for one in found.fitting)
    assert all(one.needed > one.room for one in found.too_large)
    every = [*found.fitting, *found.too_large]
    assert all(one.layout.ranks == 8 for one in every)
    assert {one.layout.tensor for one in every} == {one.layout.pipeline for one in every} == {1, 2, 4, 8}
    divisions = [replace(one.layout, micro_tokens=0, recompute=0.0) for one in every]
    assert len(set(divisions)) == len(divisions)
    assert found.own.layout == RankLayout(
        shard=8, micro_tokens=found.own.layout.micro_tokens, recompute=found.own.layout.recompute
    )
    assert 0.2 < found.utilisation(found.fitting[0]) < 0.75
    assert found.per_second(found.fitting[0]) * found.fitting[0].time.seconds == pytest.approx(found.tokens)


def test_a_poor_network_keeps_products_and_gathers_inside_nodes() -> None:
    rich, poor = (compared(NINE, "A100 80GB", 16, 2, network=rate) for rate in (2e11, 1.25e9))
    assert poor.fitting[0].time.seconds > rich.fitting[0].time.seconds
    best = poor.fitting[0].layout
    assert best.tensor * best.shard <= 8
    full = next(one for one in poor.fitting if one.layout.shard == 16)
    assert full.time.seconds > 3 * poor.fitting[0].time.seconds
    assert {sent.axis: sent.network for sent in full.time.traffic} == {"shard": True}


def test_what_a_pipeline_saves_of_memory_it_pays_by_idling() -> None:
    found = compared(NINE, "A100 80GB", 8)
    every = [*found.fitting, *found.too_large]
    eight = next(one for one in every if one.layout.pipeline == 8)
    assert eight.time.bubble > 0.1 * eight.time.seconds
    assert sum(eight.time.stages) == NINE.layers


def test_stages_with_embedding_or_head_have_fewer_layers_where_memory_is_short() -> None:
    found = compared(NINE, "RTX 4090", 8)
    eight = next(one for one in found.fitting if one.layout.pipeline == 8)
    stages = eight.time.stages
    assert sum(stages) == NINE.layers
    assert stages[0] < max(stages)
    rich = next(one for one in compared(NINE, "A100 80GB", 8).fitting if one.layout.pipeline == 8)
    assert stages[0] < rich.time.stages[0]  # which is cut by time alone


def test_one_stage_needs_what_the_estimate_says() -> None:
    """And a stage without the head, or with fewer layers, needs less."""
    config, plan = weighed(NINE, "A100 80GB", 8)
    found = compare_layouts(config, plan, NINE, Cluster(find_device("A100 80GB"), 8))
    assert found.own.needed == pytest.approx(plan.found.needed, rel=0.01)
    two = next(
        one for one in (*found.fitting, *found.too_large) if one.layout.pipeline == 2 == 8 // one.layout.shard
    )
    assert two.needed < 1.1 * found.own.needed


def test_whole_copies_recompute_no_more_than_they_must() -> None:
    found = compared(NINE, "RTX 4090", 8, method="lora").fitting
    whole = next(one for one in found if one.layout.data == 8)
    assert 0.1 < whole.layout.recompute < 0.9
    assert whole.needed == whole.room
    assert {one.layout.recompute for one in found if one is not whole} <= {0.0, 1.0}


def test_documents_are_cut_only_where_they_are_long() -> None:
    def contexts(found: LayoutComparison) -> set[int]:
        return {one.layout.context for one in (*found.fitting, *found.too_large)}

    assert contexts(compared(NINE, "A100 80GB", 4, method="lora")) == {1}
    assert contexts(compared(NINE, "A100 80GB", 4, method="lora", longest=8192)) == {1, 2}


def test_where_nothing_fits_the_least_change_is_found() -> None:
    found = compared(THIRTY_TWO, "V100 16GB", 16, 2)
    assert found.overrides == ("adapt.method=lora",)
    assert found.fitting
    assert found.too_large
    assert found.state == pytest.approx(32.6e9 * 16, rel=0.01)  # of the run as it was asked for
    assert min(one.needed for one in found.too_large) > found.state / 16


def test_what_cannot_go_together_is_left_out_by_name() -> None:
    config, found = weighed(NINE, "A100 80GB", 8, "lora")
    eight_bits = replace(found.setting, job=replace(found.setting.job, compute="fp8"))
    compared = compare_layouts(
        config, replace(found, setting=eight_bits), NINE, Cluster(find_device("A100"), 8)
    )
    assert {one.layout.tensor for one in compared.fitting} == {1}
    assert any("precision.compute=fp8 cannot go with parallel.tensor" in said for said in compared.refused)


def test_nodes_are_alike() -> None:
    with pytest.raises(UserError, match="12 devices are not 8 equal nodes"):
        Cluster(find_device("A100"), 12, 8)
