"""Where evaluations run, from what is spare."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.evaluate.statistics.samples import looks
from glm_accelerate.models.shapes import shapes_of
from glm_accelerate.plan.beside import FIRST_LOOK, Between, between, place_of
from glm_accelerate.plan.fit import SettledChoices
from glm_accelerate.plan.ground import Ground, Load, ground_of
from glm_accelerate.plan.hardware import Hardware
from glm_accelerate.plan.resolve import order_of, resolve
from glm_accelerate.plan.run_plan import RunPlan

GB = 10**9
CPU = Hardware("cpu", "a CPU", 1, 64 * GB, 64 * GB, 16, 64 * GB, True, None, None, threads=12, tiles=True)
GPUS = Hardware("cuda", "NVIDIA A100", 4, 80 * GB, 80 * GB, 32, 256 * GB, True, "13.0", "590")
# A day of steps of 30,000 tokens, a hundred evaluations of 50,000 tokens each, of 100,000 in close races.
LONG = Between(100, 500 * 30_000, 50_000, 100_000, 100_000, 1e9, "bfloat16", 2 * GB)


def config(**evaluate: object) -> RunConfig:
    return RunConfig.model_validate(
        {"model": {"path": "m"}, "data": {"train": "a.jsonl", "dev": "b.jsonl"}, "evaluate": evaluate}
    )


def test_a_spare_device_comes_first() -> None:
    place = place_of(config(), GPUS, 3, LONG)
    assert (place.where, place.device, place.bytes) == ("beside", "cuda:3", 1.2 * 2 * GB + 3 * GB)
    assert place_of(config(where="beside"), GPUS, 3, LONG).bytes == place.bytes
    for elsewhere in (place_of(config(), CPU, 1, LONG), place_of(config(where="beside"), GPUS, 4, LONG)):
        assert (elsewhere.device, elsewhere.bytes) == ("cpu", 0)


def test_a_spare_device_has_to_hold_what_training_divides() -> None:
    """A model that trains because it is divided over three devices does not fit the fourth whole."""
    large = replace(LONG, model_bytes=120 * GB)
    place = place_of(config(), GPUS, 3, replace(large, usual=1e8))
    assert place.where == "inline"
    assert place.why.startswith(
        "cuda:3 is spare, but an undivided model needs about 137 GiB of its 74.5 GiB; "
    )
    assert "spare cores would take" in place.why
    assert place_of(config(), GPUS, 3, large).device == "cpu"
    asked = place_of(config(where="beside"), GPUS, 3, large)
    assert (asked.where, asked.device, asked.threads) == ("beside", "cpu", 29)
    assert asked.why.endswith("; the config")
    assert place_of(config(), GPUS, 3, replace(LONG, model_bytes=60 * GB)).device == "cuda:3"
    assert (
        place_of(config(), GPUS, 3, replace(LONG, model_bytes=66 * GB)).device == "cpu"
    )  # no room to compute


def test_what_has_to_be_answered_has_to_keep_up_in_close_races_too() -> None:
    """One that may be left out need only keep up as a rule."""
    close = replace(LONG, most=2e9)
    assert place_of(config(), CPU, 1, close).where == "beside"
    assert "% in a close race" in place_of(config(), CPU, 1, close).why
    for said in ({"keep": "all"}, {"stop_after": 2}):
        assert place_of(config(**said), CPU, 1, LONG).where == "beside"
        assert place_of(config(**said), CPU, 1, close).where == "inline"


def test_how_long_the_largest_takes_is_told() -> None:
    """On the device where it is made: on a CPU on one core, as it begins."""
    on_core = 2 * LONG.parameters * LONG.largest / 3e11
    assert place_of(config(), CPU, 1, LONG).seconds == pytest.approx(on_core)
    assert place_of(config(where="beside"), CPU, 1, LONG).seconds == pytest.approx(on_core)
    assert place_of(config(where="inline"), CPU, 1, LONG).seconds == 0
    assert place_of(config(where="external"), CPU, 1, LONG).seconds == pytest.approx(on_core)
    on_gpu = place_of(config(), GPUS, 3, LONG).seconds
    assert 0 < on_gpu < on_core / 50
    assert place_of(config(where="external"), GPUS, 4, LONG).seconds == on_gpu
    assert place_of(config(), replace(CPU, threads=16), 1, LONG).seconds == 0


def long_run(tiny_run: dict[str, Any], **sections: object) -> tuple[RunConfig, Ground]:
    """A run with 300 held-out samples."""
    dev = Path(tiny_run["data"]["dev"])
    lines = dev.read_text(encoding="utf-8").splitlines(keepends=True)
    if len(lines) < 300:
        dev.write_text("".join((lines * 300)[:300]), encoding="utf-8")
    made = RunConfig.model_validate({**tiny_run, "train": {"steps": 100, "step_samples": 6}, **sections})
    return made, ground_of(made, CPU)


def work_of(made: RunConfig, ground: Ground, dtype: str = "bfloat16") -> Between:
    load = Load(order_of(ground.inputs, made, 6), ground.inputs.train.targets, 100, 3)
    return between(
        made, ground.sizes, ground.inputs, load, SettledChoices(dtype, "bfloat16", False, 1, 1, 1, ""), 10
    )


@pytest.mark.parametrize(
    ("samples", "first", "most"), [("auto", 128, 300), (200, 200, 200), ("all", 300, 300)]
)
def test_all_that_may_be_looked_at_counts(
    samples: object, first: int, most: int, tiny_run: dict[str, Any]
) -> None:
    """Samples of the first look, of the last, and of finalists; answers at the first look."""
    made, ground = long_run(tiny_run, evaluate={"samples": samples})
    assert ground.inputs.dev is not None
    each, work = float(ground.inputs.dev.lengths.mean()), work_of(made, ground)
    assert (work.usual, work.most, work.largest) == pytest.approx((each * first, each * most, each * 300))
    assert work.times == 10
    assert work.trained == pytest.approx(10 / 3 * int(ground.inputs.train.lengths.sum()))
    metrics = ["loss", "exact_match"]
    asking, _ = long_run(tiny_run, evaluate={"samples": samples, "metrics": metrics, "max_new_tokens": 30})
    answers = work_of(asking, ground)
    assert answers.usual == pytest.approx(work.usual + 30 * first)
    assert answers.most == pytest.approx(work.most + 30 * first)
    assert answers.largest == pytest.approx(work.largest + 30 * 300)


def test_training_between_two_is_what_the_weights_of_its_sources_make_it(tiny_run: dict[str, Any]) -> None:
    plain, ground = long_run(tiny_run)
    train = [{"path": tiny_run["data"]["train"], "weight": 10.0}]
    often, drawn = long_run(tiny_run, data={**tiny_run["data"], "train": train})
    assert work_of(often, drawn).trained == pytest.approx(10 * work_of(plain, ground).trained)


def test_the_plan_tells_how_long_the_largest_takes(tiny_run: dict[str, Any]) -> None:
    evaluate = {"where": "beside", "metrics": ["loss", "exact_match"], "max_new_tokens": 10**9}
    made, ground = long_run(tiny_run, evaluate=evaluate)
    plan = resolve(made, ground)
    expected = 2 * shapes_of(ground.sizes).parameters * 300 * 10**9 / 3e11
    assert plan.evaluate_seconds == pytest.approx(expected, rel=0.01)
    said = json.loads(json.dumps(asdict(plan)))
    assert RunPlan.from_json(said) == plan
    del said["evaluate_seconds"], said["evaluate_bytes"]  # as an older run has it
    assert RunPlan.from_json(said).evaluate_seconds == 0


def test_a_model_is_counted_as_it_is_kept(tiny_run: dict[str, Any]) -> None:
    made, ground = long_run(tiny_run)
    assert work_of(made, ground).model_bytes == 2 * shapes_of(ground.sizes).parameters
    assert work_of(made, ground, "float32").model_bytes == 4 * shapes_of(ground.sizes).parameters
    packed, _ = long_run(tiny_run, adapt={"method": "lora", "base": "nf4"})
    assert work_of(packed, ground, "nf4").model_bytes < 3 * shapes_of(ground.sizes).parameters


def test_the_first_look_is_that_of_the_exam() -> None:
    """The plan stands below the exam, and knows this one number of it."""
    assert looks(5000)[0] == FIRST_LOOK
    assert looks(2 * FIRST_LOOK)[0] == FIRST_LOOK
    assert looks(2 * FIRST_LOOK - 1) == (2 * FIRST_LOOK - 1,)


def test_spare_cores_of_a_cpu_that_keep_up() -> None:
    place = place_of(config(), CPU, 1, LONG)
    assert (place.where, place.device, place.threads) == ("beside", "cpu", 4)
    assert "4 spare cores, busy about" in place.why


def test_ranks_take_their_threads_each() -> None:
    assert place_of(config(), replace(CPU, threads=4), 3, LONG).threads == 4
    assert place_of(config(), replace(CPU, threads=8), 2, LONG).where == "inline"


@pytest.mark.parametrize(
    ("hardware", "between", "word"),
    [
        (replace(CPU, threads=16), LONG, "takes all 16 cores"),
        (replace(CPU, threads=0), LONG, "takes all 16 cores"),
        (CPU, replace(LONG, model_bytes=40 * GB), "no memory for a second model"),
        (CPU, replace(LONG, usual=1e8), "times as long as training meanwhile"),
        (CPU, replace(LONG, parameters=1e4), "the run is short"),
        (replace(GPUS, count=3), replace(LONG, usual=1e8), "times as long as training meanwhile"),
    ],
)
def test_otherwise_training_waits_and_the_reason_is_said(
    hardware: Hardware, between: Between, word: str
) -> None:
    place = place_of(config(), hardware, 3 if hardware.device == "cuda" else 1, between)
    assert place.where == "inline"
    assert word in place.why


@pytest.mark.parametrize("where", ["inline", "external", "beside"])
def test_the_config_has_the_last_word(where: str) -> None:
    place = place_of(config(where=where), replace(CPU, threads=16), 1, LONG)
    assert place.where == where
    assert place.threads == (1 if where == "beside" else 0)


def test_more_work_between_two_makes_an_evaluator_on_cores_worth_while() -> None:
    """The same evaluation, more and more training between two: inline at first, beside from some point on."""
    wheres = [
        place_of(config(), CPU, 1, replace(LONG, trained=tokens, usual=1e6)).where
        for tokens in (1e4, 1e5, 1e6, 1e7, 1e8)
    ]
    assert wheres == sorted(wheres, reverse=True)
    assert {*wheres} == {"inline", "beside"}
