"""An evaluation between two steps: always the same samples, published, and never the end of training."""

import json
import math
from dataclasses import replace

import pytest
import torch

from glm_accelerate.evaluate.inline import InlineEvaluator
from glm_accelerate.evaluate.results import read_results


@pytest.fixture
def evaluator(tmp_path, samples, words, held):
    return InlineEvaluator(
        held_out=held(samples),
        samples=5,
        micro_tokens=64,
        tokenizer=words,
        stops=(1,),
        metrics=("loss", "exact_match"),
        max_new_tokens=5,
        run_dir=tmp_path,
        attempt=2,
    )


def test_an_evaluation_is_published_and_told(evaluator, model):
    event = evaluator.evaluate(model, 40)
    result = read_results(evaluator.run_dir)[40]
    assert result.event() == event
    assert event["status"] == "done"
    assert event["samples"] == 5
    assert event["total"] == 7
    assert result.ci95 is not None
    assert result.loss is not None
    assert result.ci95[0] < result.loss < result.ci95[1]
    assert result.attempt == 2
    assert event["metrics"] == {"exact_match": 0.0}
    (file,) = (evaluator.run_dir / "evals").glob("40-*-2.predictions.jsonl")
    assert {"prompt", "reference", "answer", "right"} == set(json.loads(file.read_text().splitlines()[0]))


def test_every_step_and_every_run_judges_the_same_samples(evaluator, model):
    assert evaluator.evaluate(model, 1)["loss"] == evaluator.evaluate(model, 2)["loss"]
    assert list(replace(evaluator, attempt=3).chosen) == list(evaluator.chosen)
    assert len(set(evaluator.chosen)) == 5
    everything = replace(evaluator, samples=100)
    assert list(everything.chosen) == list(range(7))


def test_the_plan_names_what_is_asked(evaluator, model):
    plans = {
        evaluator.plan,
        replace(evaluator, samples=4).plan,
        replace(evaluator, stops=(1, 2)).plan,
        replace(evaluator, metrics=("loss",)).plan,
        replace(evaluator, max_new_tokens=6).plan,
    }
    assert len(plans) == 5
    assert replace(evaluator, attempt=7).plan == evaluator.plan


def test_training_is_not_touched(evaluator, model):
    model.train()
    state, weights = torch.get_rng_state(), [p.detach().clone() for p in model.parameters()]
    evaluator.evaluate(model, 1)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, before) for p, before in zip(model.parameters(), weights, strict=True))


def test_only_what_was_asked_is_measured(evaluator, model):
    event = replace(evaluator, metrics=("loss",)).evaluate(model, 1)
    assert event["metrics"] == {}
    event = replace(evaluator, metrics=("exact_match",)).evaluate(model, 2)
    assert event["loss"] is None
    assert event["status"] == "done"


def test_a_prompt_that_is_too_long_fails_the_evaluation_only(evaluator, model):
    model.sizes = replace(model.sizes, max_positions=8)
    event = evaluator.evaluate(model, 1)
    assert event["status"] == "failed"
    assert "the model has 8 positions" in str(event["reason"])
    assert math.isfinite(event["loss"])  # what was measured before is kept
    assert read_results(evaluator.run_dir)[1].reason == event["reason"]


def test_out_of_memory_fails_the_evaluation_only(evaluator, model):
    model.sizes = replace(model.sizes, layers=10**12)  # a cache that no machine has
    event = evaluator.evaluate(model, 1)
    assert event["status"] == "failed"
    assert str(event["reason"]).startswith("out of memory")


def test_our_own_bugs_are_not_swallowed(evaluator, model):
    model.sizes = replace(model.sizes, kv_heads=3)  # contradicts the tensors
    with pytest.raises(RuntimeError, match=r"size|shape"):
        evaluator.evaluate(model, 1)


def test_a_model_that_has_diverged(evaluator, model):
    model.head.weight.data[:] = math.nan
    event = evaluator.evaluate(model, 1)
    assert event["status"] == "failed"
    assert event["loss"] is None
    assert event["reason"] == "the held-out loss is not finite"
    json.dumps(event, allow_nan=False)
