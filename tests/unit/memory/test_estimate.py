"""What a step needs, predicted from shapes, against what the same step takes: bytes, not times."""

import gc
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.memory.cases import CHATGLM, LARGE, LARGE_FULL, SMALL
from benchmarks.memory.tracked import allocations, borrowed, measure, most_between
from glm_accelerate.kernels.native.build import lacking
from glm_accelerate.memory.estimate import estimate
from glm_accelerate.memory.job import Job
from glm_accelerate.models.shapes import shapes_of
from glm_accelerate.models.sizes import Sizes

TINY = replace(SMALL, vocabulary=4000, layers=2)
EAGER = Job(TINY, form="eager", pass_tokens=384, longest=384, learnt=384)
PLAIN = replace(TINY, sandwich=False, qkv_bias=True)
COMPRESSED = replace(
    PLAIN,
    shared_qk=2,
    ranks={f"layers.{n}.{name}": 64 for n in (0, 1) for name in ("mlp.down_proj", "self_attn.o_proj")}
    | {"layers.0.self_attn.q_proj": 32},
)
ODD = replace(TINY, mlp_width=3448, vocabulary=512)
JOBS = {
    "lora": EAGER,
    "lora of short documents": replace(EAGER, longest=128),
    "lora, ChatGLM, blocks": replace(EAGER, sizes=replace(CHATGLM, layers=2), recompute="blocks"),
    "lora on int8": replace(EAGER, base="int8"),
    "full": replace(EAGER, method="full", sizes=PLAIN),
    "full, two passes": replace(EAGER, method="full", passes=2, recompute="blocks"),
    "full, adafactor, float32": replace(EAGER, method="full", optimizer="adafactor", compute="float32"),
    "freeze": replace(EAGER, method="freeze", last=1),
    "prefix": replace(EAGER, method="prefix", prefix_tokens=64),
    "lora, compressed": replace(EAGER, sizes=COMPRESSED),
    "full, compressed, two passes": replace(EAGER, method="full", sizes=COMPRESSED, passes=2),
}
NATIVE = {
    name: replace(JOBS[name], form="native") for name in ("lora", "lora of short documents", "full", "freeze")
} | {
    "lora of a width that our C++ leaves to torch": replace(
        EAGER, sizes=ODD, form="native", dropout=0.5, pass_tokens=1024
    )
}


SHARED = replace(EAGER, ranks=2, context=2, pass_tokens=640, longest=1280, gathered=960)


@pytest.fixture(autouse=True)
def one_thread() -> Generator[None]:
    """C++ keeps sums for each thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_tracker_counts_what_is_known_to_be_alive() -> None:
    with borrowed() as loans, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        a = torch.empty(1000, 1000)
        lent = torch.from_numpy(a[0].numpy().copy())
        b = a + 1  # the most: a, b, what is lent
        del a
        c = b.exp_()
        del lent
    most = most_between(allocations(seen) + loans, 0)
    assert most == pytest.approx(2 * 4_000_000 + 4_000, abs=64)  # numbers that are operands are tensors, too
    assert c is b


@pytest.mark.parametrize("name", list(JOBS))
def test_predicted_is_measured(name: str, tmp_path: Path) -> None:
    job = JOBS[name]
    assert estimate(job).allocated == pytest.approx(measure(job, tmp_path), rel=0.05)


@pytest.mark.skipif(lacking() is not None, reason=str(lacking()))
@pytest.mark.parametrize("name", list(NATIVE))
def test_predicted_is_measured_with_our_own_operators(name: str, tmp_path: Path) -> None:
    job = NATIVE[name]
    assert estimate(job).allocated == pytest.approx(measure(job, tmp_path), rel=0.05)


@pytest.mark.parametrize(("method", "sizes"), [("full", TINY), ("full", SMALL), ("lora", LARGE.sizes)])
def test_divided_among_more_ranks_each_needs_less(method: str, sizes: Sizes) -> None:
    job = replace(EAGER, method=method, sizes=sizes)
    most = [estimate(replace(job, ranks=n, shards=n)).peak for n in (1, 2, 4, 8, 16)]
    assert most == sorted(set(most), reverse=True)


@pytest.mark.parametrize("sizes", [TINY, SMALL, LARGE.sizes])
def test_with_a_copy_a_rank_no_adapter_needs_more_than_alone(sizes: Sizes) -> None:
    job = replace(EAGER, sizes=sizes)
    assert {estimate(replace(job, ranks=n)).peak for n in (1, 2, 8)} == {estimate(job).peak}


@pytest.mark.process
@pytest.mark.parametrize(
    "job",
    [
        pytest.param(SHARED, id="eager"),
        pytest.param(replace(SHARED, recompute="blocks"), id="blocks", marks=pytest.mark.prove),
        pytest.param(
            replace(SHARED, form="native"),
            id="native",
            marks=pytest.mark.skipif(lacking() is not None, reason=str(lacking())),
        ),
    ],
)
def test_predicted_is_measured_where_ranks_share_a_document(job: Job, tmp_path: Path) -> None:
    assert estimate(job).allocated == pytest.approx(measure(job, tmp_path), rel=0.05)


@pytest.mark.process
@pytest.mark.parametrize("method", ["lora", "full"])
def test_predicted_is_measured_where_ranks_share_products(method: str, tmp_path: Path) -> None:
    """With words enough that wide copies of their logits would be the most."""
    whole = replace(TINY, vocabulary=32_000)
    job = replace(EAGER, sizes=whole.part(2), method=method, tensor=2)
    assert estimate(job).allocated == pytest.approx(measure(job, tmp_path, whole), rel=0.05)


@pytest.mark.process
@pytest.mark.parametrize("zero", [1, 2])
def test_predicted_is_measured_where_weights_stay_between_passes(zero: int, tmp_path: Path) -> None:
    job = replace(EAGER, method="full", ranks=2, shards=2, passes=2, zero=zero)
    assert estimate(job).allocated == pytest.approx(measure(job, tmp_path), rel=0.05)


def test_nine_billion_weights_take_what_is_published() -> None:
    found = estimate(LARGE)
    weights = next(item for item in found.items if item.what == "parameters")
    outside_and_in = 74_368  # inputs and outputs of a block's six layers
    assert 2 * shapes_of(LARGE.sizes).parameters == 18_800_189_440  # the files of GLM-4-9B-0414
    assert weights.bytes == 18_800_189_440 + 4 * 8 * 40 * outside_and_in
    assert found.total("device") == found.peak > found.allocated


def test_every_lever_lowers_the_peak_and_says_where_it_went() -> None:
    most = estimate(LARGE)
    blocks = estimate(replace(LARGE, recompute="blocks"))
    away = estimate(replace(LARGE, offload=frozenset({"activations"})))
    assert max(blocks.peak, away.peak) < most.peak
    assert away.host > most.host
    full = estimate(LARGE_FULL)
    for lever in (
        replace(LARGE_FULL, optimizer="adamw8bit"),
        replace(LARGE_FULL, optimizer="adafactor", fuse_update=True),
        replace(LARGE_FULL, fuse_update=True),
        replace(LARGE_FULL, offload=frozenset({"optimizer"})),
    ):
        assert estimate(lever).peak < full.peak
    base = [estimate(replace(LARGE, base=base)).peak for base in ("bfloat16", "int8", "nf4")]
    assert base == sorted(base, reverse=True)
    assert estimate(replace(LARGE, offload=frozenset({"weights"}))).peak < base[-1]


def test_stages_are_estimated_alike_whenever_python_tidies_up() -> None:
    """Every rank plans for itself, and the plans have to be one."""
    stage = replace(LARGE_FULL, recompute="blocks", passes=8).of_stage(0, 8, 0, 3)
    on = estimate(stage)
    gc.disable()
    try:
        assert estimate(stage) == on
    finally:
        gc.enable()


def test_the_first_stage_has_all_its_passes_beside_gradients_from_the_third_on() -> None:
    """Of two passes the second finds gradients when none but itself has been forward."""
    two, three, four = (
        estimate(replace(LARGE_FULL, passes=passes).of_stage(0, 2, 0, 3)).peak for passes in (2, 3, 4)
    )
    assert two < three == four


def test_reasons_say_what_is_assumed() -> None:
    items = estimate(LARGE).items
    assumed = {item.what for item in items if item.why.startswith("assumed")}
    assert {"context", "fragmentation"} <= assumed
    assert all(item.why and item.bytes > 0 for item in items)
