"""Where evaluations run, from what is spare."""

from dataclasses import replace

import pytest

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.plan.beside import Between, place_of
from glm_accelerate.plan.hardware import Hardware

GB = 10**9
CPU = Hardware("cpu", "a CPU", 1, 64 * GB, 64 * GB, 16, 64 * GB, True, "2.13", None, None, threads=12)
GPUS = Hardware("cuda", "NVIDIA A100", 4, 80 * GB, 80 * GB, 32, 256 * GB, True, "2.13", "13.0", "590")
# A day of steps of 30,000 tokens, a hundred evaluations of 100,000 tokens each.
LONG = Between(100, 500 * 30_000, 100_000, 1e9, "bfloat16", 4 * GB)


def config(**evaluate: object) -> RunConfig:
    return RunConfig.model_validate(
        {"model": {"path": "m"}, "data": {"train": "a.jsonl", "dev": "b.jsonl"}, "evaluate": evaluate}
    )


def test_a_spare_device_comes_first() -> None:
    place = place_of(config(), GPUS, 3, LONG)
    assert (place.where, place.device) == ("beside", "cuda:3")


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
        (CPU, replace(LONG, judged=1e8), "times as long as training meanwhile"),
        (CPU, replace(LONG, parameters=1e4), "the run is short"),
        (replace(GPUS, count=3), replace(LONG, judged=1e8), "times as long as training meanwhile"),
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
        place_of(config(), CPU, 1, replace(LONG, trained=tokens, judged=1e6)).where
        for tokens in (1e4, 1e5, 1e6, 1e7, 1e8)
    ]
    assert wheres == sorted(wheres, reverse=True)
    assert {*wheres} == {"inline", "beside"}
