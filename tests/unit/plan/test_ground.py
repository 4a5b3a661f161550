"""What a plan is made for, where ranks share every product or long documents, or have other layers."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glm_accelerate.config.load import override
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.pack import aligned
from glm_accelerate.memory.estimate import estimate
from glm_accelerate.parallel.place import Axes
from glm_accelerate.plan.ground import Ground, ground_of
from glm_accelerate.plan.hardware import detect
from glm_accelerate.plan.resolve import plan_and_weigh
from glm_accelerate.plan.weigh import advise
from glm_accelerate.runtime.errors import UserError


@pytest.fixture
def config(tiny_run: dict[str, Any]) -> RunConfig:
    return override(RunConfig.model_validate(tiny_run), ["adapt.method=full", "parallel.shard=off"])


def ground(config: RunConfig, ranks: int) -> Ground:
    return ground_of(config, replace(detect(), device="cpu"), ranks)


def test_ranks_that_share_products_need_less_and_take_the_same_samples(config: RunConfig) -> None:
    here = ground(config, 4)
    whole, _ = plan_and_weigh(config, here)
    plan, weighed = plan_and_weigh(override(config, ["parallel.tensor=4"]), here)
    assert (whole.tensor, whole.query, plan.tensor, plan.query) == (1, 1, 2, 2)  # two key heads
    assert (plan.ranks, weighed.setting.job.ranks, weighed.setting.job.tensor) == (4, 1, 4)
    assert (Axes.of(whole), Axes.of(plan)) == (Axes(data=4), Axes(tensor=2, query=2))
    assert whole.memory is not None
    assert plan.memory is not None

    def bytes_of(what: str, memory: Any) -> int:
        return sum(item.bytes for item in memory.items if item.what == what)

    assert 3 < bytes_of("optimizer", whole.memory) / bytes_of("optimizer", plan.memory) < 4  # norms are whole


@pytest.mark.parametrize(
    ("ranks", "tensor", "why"),
    [(4, 3, "does not divide 4 ranks"), (3, 3, "4 heads and MLPs of 48 are not 3 equal parts")],
)
def test_what_cannot_be_shared_is_refused(config: RunConfig, ranks: int, tensor: int, why: str) -> None:
    with pytest.raises(UserError, match=re.escape(why)) as refused:
        plan_and_weigh(override(config, [f"parallel.tensor={tensor}"]), ground(config, ranks))
    assert "parallel.tensor=1" in (refused.value.cure or "")


def test_layers_are_divided_into_stages_and_the_first_holds_the_most(config: RunConfig) -> None:
    here = ground(config, 4)
    four = ["train.step_samples=16", "train.micro_tokens=64", "data.max_tokens=64"]
    plan, weighed = plan_and_weigh(override(config, ["parallel.pipeline=2", *four]), here)
    job = weighed.found.setting.job
    assert plan.stages == job.stages == (1, 1)
    assert Axes.of(plan) == Axes(pipeline=2, data=2)
    assert (job.ranks, job.processes, job.passes) == (2, 4, 3)  # the first stage has two, and gradients
    first, last = job.of_stages()
    assert (first.embeds, first.heads, first.held) == (True, False, 2)
    assert (last.embeds, last.heads, last.held) == (False, True, 1)
    assert plan.memory is not None
    each = [estimate(one) for one in (first, last)]
    assert plan.memory.needed == max(one.peak + one.host - one.spared for one in each)
    said = next(reason for reason in plan.reasons if reason.name == "stages")
    assert said.value == "1 + 1"
    assert re.match(r"layers; \d+% of a step of \d+ passes is waiting", said.why)


@pytest.mark.parametrize(
    ("ranks", "pipeline", "more", "why"),
    [
        (4, 3, "optim.clip=1", "3, which does not divide 4 ranks"),
        (3, 3, "optim.clip=1", "is 3, the model has 2 layers"),
    ],
)
def test_what_cannot_be_staged_is_refused(
    config: RunConfig, ranks: int, pipeline: int, more: str, why: str
) -> None:
    with pytest.raises(UserError, match=re.escape(why)) as refused:
        plan_and_weigh(override(config, [f"parallel.pipeline={pipeline}", more]), ground(config, ranks))
    assert refused.value.cure


def test_a_stage_without_trained_layers_needs_less(config: RunConfig) -> None:
    """Only the last of two layers trains: the first stage has no gradients, and hardly any backward pass."""
    said = ["parallel.pipeline=2", "adapt.method=freeze", "adapt.layers=1"]
    plan, weighed = plan_and_weigh(override(config, said), ground(config, 2))
    job = weighed.found.setting.job
    assert plan.stages == (1, 1)
    first, last = job.of_stages()
    assert (first.last, last.last) == (0, 1)
    assert not any(item.what in ("gradients", "optimizer") for item in estimate(first).items if item.bytes)
    assert estimate(first).peak < estimate(last).peak


@pytest.fixture
def long(config: RunConfig, tmp_path: Path) -> RunConfig:
    """One sample is longer than a pass of its own accord."""
    file = tmp_path / "train.jsonl"
    messages = [
        {"role": "user", "content": "Say in German: red"},
        {"role": "assistant", "content": " ".join(["rot"] * 5000)},
    ]
    file.write_text(file.read_text(encoding="utf-8") + json.dumps({"messages": messages}) + "\n")
    return override(config, ["data.max_tokens=16384", "adapt.method=lora"])


def test_a_document_that_ranks_share_needs_less_and_the_plan_says_what_fits(long: RunConfig) -> None:
    here = ground(long, 4)
    whole, _ = plan_and_weigh(long, here)
    plan, weighed = plan_and_weigh(override(long, ["parallel.context=4"]), here)
    shared, _ = plan_and_weigh(override(long, ["parallel.context=4", "memory.recompute=blocks"]), here)
    longest, job = int(here.inputs.train.lengths.max()), weighed.found.setting.job
    assert whole.micro_tokens == aligned(longest) > 2 * plan.micro_tokens
    assert (plan.context, plan.micro_tokens, job.ranks, job.context) == (4, aligned(-(-longest // 4)), 4, 4)
    assert Axes.of(plan) == Axes(data=4, context=4)
    assert job.gathered == pytest.approx(longest * 7 / 8, abs=8)
    assert plan.evaluate_where == "inline"
    assert whole.memory is not None
    assert plan.memory is not None
    assert plan.memory.needed < whole.memory.needed
    assert shared.memory is not None
    limit = f"memory.limit={(shared.memory.needed + (1 << 20)) >> 20}MiB"
    _, tight = plan_and_weigh(override(long, [limit]), here)
    assert "parallel.context=4" in (advise(tight).overrides or ())
    said = next(reason for reason in plan.reasons if reason.name == "context")
    assert f"up to {4 * plan.micro_tokens:,} tokens fit" in said.why


@pytest.mark.parametrize(
    ("ranks", "context", "more", "why"),
    [
        (4, 3, "optim.clip=1", "parallel.context is 3, which does not divide 4 ranks"),
        (4, 4, "parallel.tensor=2", "parallel.context is 4, which does not divide 2 ranks"),
        (4, 4, "parallel.pipeline=2", "parallel.context is 4, which does not divide 2 ranks"),
    ],
)
def test_what_cannot_share_documents_is_refused(
    config: RunConfig, ranks: int, context: int, more: str, why: str
) -> None:
    with pytest.raises(UserError, match=re.escape(why)) as refused:
        plan_and_weigh(override(config, [f"parallel.context={context}", more]), ground(config, ranks))
    assert refused.value.cure
