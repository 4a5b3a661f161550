"""Plans of real configs on devices that are not here: a tiny model, and one with the sizes of GLM-4-9B."""

import json
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from glm_accelerate.config.load import override
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.models.shapes import shapes_of
from glm_accelerate.plan import cost, resolve
from glm_accelerate.plan.ground import Ground, ground_of
from glm_accelerate.plan.hardware import GIB, Hardware, as_hardware, detect, find_device
from glm_accelerate.plan.levers import possible
from glm_accelerate.plan.resolve import fitting_plan, plan_and_weigh
from glm_accelerate.plan.run_plan import RunPlan
from glm_accelerate.plan.weigh import Weighed, advise, duration
from glm_accelerate.runtime.errors import UserError

NINE = {
    "hidden_size": 4096,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 13696,
    "vocab_size": 151552,
}


@pytest.fixture
def tiny(tiny_run: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(tiny_run)


@pytest.fixture
def nine(tiny_run: dict[str, Any]) -> RunConfig:
    """GLM-4-9B, for all that a plan looks at."""
    file = Path(tiny_run["model"]["path"]) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | NINE))
    return RunConfig.model_validate(tiny_run | {"model": {"path": tiny_run["model"]["path"]}})


def shallow(config: RunConfig, layers: int) -> None:
    file = Path(config.model.path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": layers}))


def on(name: str, count: int = 1) -> Hardware:
    return as_hardware(find_device(name), count)


def weighed(
    config: RunConfig, hardware: Hardware, *overrides: str, ranks: int = 1
) -> tuple[RunPlan, Weighed]:
    config = override(config, overrides)
    return plan_and_weigh(config, ground_of(config, hardware, ranks))


def test_a_tiny_model_fits_here_with_nothing_saved(tiny: RunConfig) -> None:
    plan = fitting_plan(tiny, ground_of(tiny, detect()))
    assert plan.memory is not None
    assert plan.memory.fits
    assert (plan.recompute, plan.offload, plan.fuse_update) == (False, (), False)
    assert plan.memory.needed >= plan.memory.peak > 0
    assert RunPlan.from_json(json.loads(json.dumps(asdict(plan)))) == plan


def test_what_the_config_leaves_open_is_chosen_to_fit(nine: RunConfig) -> None:
    large = weighed(nine, on("H200"))[0]
    assert large.memory is not None
    assert large.memory.fits
    assert not large.recompute
    needed = large.memory.needed
    tight, _ = weighed(nine, on("H200"), f"memory.limit={(needed >> 20) - 1}MiB")
    assert tight.memory is not None
    assert tight.memory.fits
    assert tight.recompute or tight.micro_tokens < large.micro_tokens
    said, _ = weighed(nine, on("H200"), f"memory.limit={(needed >> 20) - 1}MiB", "memory.recompute=off",
                      f"train.micro_tokens={large.micro_tokens}")  # fmt: skip
    assert said.memory is not None
    assert not said.memory.fits  # what the config says is done


def test_what_is_watched_is_what_can_be_seen(nine: RunConfig, tiny: RunConfig) -> None:
    there = weighed(nine, on("H200"))[0].memory
    assert there is not None
    assert there.watched("cuda") < there.needed
    here = weighed(tiny, replace(detect(), device="cpu"))[0].memory
    assert here is not None
    assert here.watched("cpu") > here.peak


def test_after_running_out_there_is_always_something_to_type(nine: RunConfig) -> None:
    plan, _ = weighed(nine, on("H200"))
    assert plan.sparing == "memory.recompute=blocks"
    plan = replace(plan, recompute=True)
    while plan.sparing.startswith("train.micro_tokens="):
        smaller = override(nine, [plan.sparing]).train.micro_tokens
        assert isinstance(smaller, int)
        assert smaller < plan.micro_tokens
        plan = replace(plan, micro_tokens=smaller)
    assert override(nine, [plan.sparing]).memory.offload == ["activations"]


def test_a_run_that_does_not_fit_is_refused_with_the_cure(nine: RunConfig) -> None:
    config = override(nine, ["adapt.method=full"])
    with pytest.raises(UserError) as caught:
        fitting_plan(config, ground_of(config, on("RTX 3060")))
    said = str(caught.value)
    assert said.startswith("does not fit: a step needs ")
    assert "11.8 GiB are free on RTX 3060 (adapt.method=lora adapt.base=" in said
    assert "\n" not in said
    anyway = said.rpartition("or ")[2].partition(" ")[0]
    assert anyway.startswith("memory.limit=")
    assert fitting_plan(override(config, [anyway]), ground_of(config, on("RTX 3060"))).memory is not None


@pytest.mark.parametrize(
    ("device", "overrides"),
    [
        ("8GiB", ["adapt.method=full"]),
        ("6GiB", []),
        ("RTX 3060", ["adapt.method=freeze", "adapt.layers=8", "memory.recompute=off", "data.batching=pad"]),
        ("30GiB", ["adapt.method=full", "train.micro_tokens=4096", "memory.recompute=off"]),
        ("5GiB", ["memory.recompute=blocks"]),
    ],
)
def test_the_advice_taken_fits_and_nothing_of_it_can_be_spared(
    nine: RunConfig, device: str, overrides: list[str]
) -> None:
    shallow(nine, 10)
    plan, found = weighed(nine, on(device), *overrides)
    assert plan.memory is not None
    assert not plan.memory.fits
    advice = advise(found)
    assert advice.overrides is not None
    words = [word for text in advice.overrides for word in text.split()]
    assert "--gpus" not in words
    taken, _ = weighed(nine, on(device), *overrides, *words)
    assert taken.memory is not None
    assert taken.memory.fits
    assert taken.memory.needed == advice.bytes
    assert [rung.override for rung in advice.rungs if rung.wanted]
    for word in words:
        if word.startswith(("adapt.method", "optim.clip")):
            continue  # others stand on it
        without, _ = weighed(nine, on(device), *overrides, *(other for other in words if other != word))
        assert without.memory is not None
        assert not without.memory.fits, word


def test_the_cheapest_is_what_trying_everything_finds(nine: RunConfig) -> None:
    overrides = ["adapt.method=full", "memory.recompute=off", "data.batching=pad", "train.micro_tokens=1024"]
    shallow(nine, 3)
    _, found = weighed(nine, on("A100 80GB"), *overrides)
    ladder, levers = found.ladder, [lever[:3] for lever in found.levers[:7]]
    every = [ladder.judge(found.setting, options) for options in product(*levers)]
    every = [one for one in every if possible(one.setting)]
    for room in (5 * GIB, 6 * GIB, 8 * GIB, 20 * GIB, 35 * GIB, 60 * GIB):
        ladder.room = room
        best = ladder.cheapest(found.setting, levers)
        fitting = [one for one in every if one.needed <= room]
        if not fitting:
            assert best is None
            continue
        assert best is not None
        tiers = {one.options: max(option.tier for option in one.options) for one in every}
        lowest = [
            one for one in fitting if tiers[one.options] == min(tiers[other.options] for other in fitting)
        ]
        spare = [one for one in lowest if not any(set(other.typed) < set(one.typed) for other in lowest)]
        assert best.options in {one.options for one in spare}
        assert best.seconds == min(one.seconds for one in spare)


def test_rungs_only_lead_down(nine: RunConfig) -> None:
    shallow(nine, 10)
    _, found = weighed(nine, on("RTX 3060"), "adapt.method=full", "memory.recompute=off", "data.batching=pad")
    rungs = advise(found).rungs
    sizes = [rung.bytes for rung in rungs if not rung.override.startswith("memory.offload")]
    assert sizes == sorted(sizes, reverse=True)  # more devices stand in the place of offload
    typed = [rung.override for rung in rungs]
    assert (
        typed.index("optim.name=adamw8bit") < typed.index("adapt.method=lora") < typed.index("adapt.base=nf4")
    )


@pytest.mark.parametrize("method", ["lora", "lora adapt.base=nf4", "full", "freeze", "prefix"])
@pytest.mark.parametrize("shard", ["auto", "off"])
@pytest.mark.parametrize("batching", ["pack", "pad"])
def test_more_ranks_never_need_more_memory_than_one(
    nine: RunConfig, method: str, shard: str, batching: str
) -> None:
    """With steps of several passes; in a step of a single one gradients need not be added up."""
    overrides = [*f"adapt.method={method}".split(), f"parallel.shard={shard}", f"data.batching={batching}"]
    overrides += ["train.micro_tokens=64", "train.step_samples=16"]
    needed: list[int] = []
    for ranks in (1, 2, 4, 8):
        plan, _ = weighed(nine, on("H200", ranks), *overrides, "memory.recompute=off", ranks=ranks)
        assert plan.memory is not None
        needed.append(plan.memory.needed)
    assert max(needed) == needed[0]


def test_time_is_work_over_speed(nine: RunConfig) -> None:
    slow, fast = (duration(weighed(nine, on(name))[1]) for name in ("RTX 3090", "H200"))
    assert slow.seconds is not None
    assert fast.seconds is not None
    assert slow.seconds > 5 * fast.seconds
    assert "assumed" in slow.why
    assert duration(weighed(nine, on("12GiB"))[1]).seconds is None
    measured = duration(weighed(nine, on("RTX 3090"))[1], 100.0)
    assert measured.seconds == pytest.approx(measured.tokens / 100)


def test_sources_that_are_drawn_more_often_take_longer(
    tiny: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "missing", lambda _: "")
    monkeypatch.setattr(resolve, "no_native", lambda: None)
    here = replace(detect(), device="cpu", bf16=True, tiles=False, threads=2)
    said: dict[str, Any] = tiny.model_dump() | {"train": {"epochs": 1.0}}
    once = RunConfig.model_validate(said)
    said["data"]["train"][0]["weight"] = 1000.0
    often = RunConfig.model_validate(said)
    shares = [duration(weighed(config, here)[1]) for config in (once, often)]
    assert shares[1].tokens == pytest.approx(1000 * shares[0].tokens)
    assert shares[1].flops == pytest.approx(1000 * shares[0].flops)
    monkeypatch.setattr(cost, "CORE_BFLOAT16", 6e3 * shapes_of(ground_of(tiny, here).sizes).parameters)
    plans = [weighed(config, here)[0] for config in (once, often)]
    assert [plan.compile for plan in plans] == [False, True]


def test_ranks_on_a_cpu_share_the_host(tiny: RunConfig) -> None:
    here = replace(detect(), device="cpu", free_bytes=8 * GIB, memory_bytes=16 * GIB)
    rooms = [weighed(tiny, here, ranks=ranks)[0].memory for ranks in (1, 2)]
    assert [room and room.room for room in rooms] == [8 * GIB, 4 * GIB]


def test_a_gpu_without_bfloat16_computes_in_float16_where_it_can(nine: RunConfig) -> None:
    assert weighed(nine, on("V100 32GB"))[0].compute == "float16"
    moved = "memory.offload=[optimizer]"  # which a loss scale cannot go with
    assert weighed(nine, on("V100 32GB"), moved)[0].compute == "float32"
    slow = replace(detect(), device="cpu", bf16=False)
    assert weighed(nine, slow)[0].compute == "float32"


def test_a_ground_can_be_told(tiny: RunConfig) -> None:
    ground = ground_of(tiny, detect(), 2)
    assert isinstance(ground, Ground)
    assert ground.ranks == 2
