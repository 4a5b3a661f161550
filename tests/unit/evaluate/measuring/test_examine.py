"""One evaluation of a model: as many samples as are needed, never the end of training."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from glm_accelerate.evaluate.measuring.exam import Exam
from glm_accelerate.evaluate.measuring.examine import GlmExaminer, failed
from glm_accelerate.evaluate.measuring.losses import sample_losses, split
from glm_accelerate.evaluate.protocol.messages import Findings, Request, full_exam_id
from glm_accelerate.evaluate.statistics.intervals import SampleLosses
from glm_accelerate.evaluate.statistics.samples import draw_order
from glm_accelerate.kernels.native.build import lacking
from glm_accelerate.models.bind import bind_operators
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.runtime.errors import UserError


@pytest.fixture
def exam(samples, words, held) -> Exam:
    held_out = held(samples * 4)
    choice = draw_order(held_out.lengths, np.zeros(len(held_out), int), 0)
    return Exam(
        held_out, choice.order, choice.strata, (10, 28), 64, words, (1,), ("loss", "exact_match"), 5, 0.01
    )


@pytest.fixture
def examiner(exam, model) -> GlmExaminer:
    return GlmExaminer(exam, model)


def ask(
    examiner: GlmExaminer, against: SampleLosses | None = None, step: int = 40, **said: object
) -> Findings:
    request = Request(step, examiner.exam_id, 2, "w", against="20-abc-1" if against else None)
    return examiner.examine(replace(request, **said), "run", against)


def test_what_is_found(examiner, model, exam):
    found = ask(examiner)
    result = found.result
    assert (result.step, result.attempt, result.status, result.total) == (40, 2, "done", 28)
    assert result.samples == 28  # inline, with nothing to compare with: to the last look
    assert result.loss is not None
    assert result.ci95 == (result.loss, result.loss)  # all of them: nothing is left to chance
    assert result.metrics == {"exact_match": 0.0}
    asked = [number for number in exam.order[:10] if split(exam.held_out[int(number)], exam.stops)]
    assert len(found.predictions) == len(asked)
    truth = sample_losses(model, [exam.held_out[int(number)] for number in exam.order])
    np.testing.assert_allclose(found.losses.losses_N, truth.losses_N, rtol=1e-9)
    assert (found.losses.targets_N == truth.targets_N).all()
    json.dumps(result.event(), allow_nan=False)


def test_one_that_is_clearly_worse_is_left_after_the_first_look(examiner):
    best = ask(examiner).losses
    better = SampleLosses(best.losses_N * 0.5, best.targets_N)
    found = ask(examiner, better)
    assert found.result.samples == 10
    assert found.result.against.verdict == "worse"
    assert (found.result.against.look, found.result.against.looks) == (1, 2)
    assert found.result.against.difference > 0


def test_a_better_one_is_measured_to_the_end_where_it_cannot_come_back(examiner):
    best = ask(examiner).losses
    worse = SampleLosses(best.losses_N * 2, best.targets_N)
    assert ask(examiner, worse).result.samples == 28
    beside = replace(examiner, load=lambda path: None)
    assert ask(beside, worse).result.samples == 10
    assert ask(beside, worse).result.against.verdict == "better"


def test_the_same_weights_are_tied(examiner):
    found = ask(examiner, ask(examiner).losses).result.against
    assert (found.verdict, found.difference) == ("tied", 0.0)


def test_more_of_the_best_is_measured_where_it_is_needed(examiner, tmp_path: Path):
    """The best was looked at once; the new one is so near to it that all samples are needed."""
    loaded: list[str] = []
    beside = replace(
        examiner, load=lambda path: loaded.append(path.name), exam=replace(examiner.exam, margin=0.0)
    )
    first = ask(beside).losses
    assert len(first.losses_N) == 10
    (tmp_path / "best").mkdir()
    noisy = SampleLosses(
        first.losses_N + np.where(np.arange(10) % 2, 3.0, -3.0) * (first.targets_N > 0), first.targets_N
    )
    request = Request(40, beside.exam_id, 2, "new", against="20-abc-1", against_weights="best")
    loaded.clear()
    found = beside.examine(request, str(tmp_path), noisy)
    assert loaded == ["new", "best", "new"]
    assert found.result.samples == 28
    assert len(found.baseline_losses.losses_N) == 28
    assert (found.baseline_losses.losses_N[:10] == noisy.losses_N).all()


def test_no_more_is_measured_than_can_be_compared(examiner):
    """The weights of the best are gone: of it no more will be known than was measured."""
    beside = replace(examiner, load=lambda path: None, exam=replace(examiner.exam, margin=0.0))
    first = ask(beside).losses
    noisy = SampleLosses(
        first.losses_N + np.where(np.arange(10) % 2, 3.0, -3.0) * (first.targets_N > 0), first.targets_N
    )
    noisy = SampleLosses(noisy.losses_N[:6], noisy.targets_N[:6])
    result = ask(beside, noisy).result
    assert (result.against.verdict, result.samples) == ("undecided", 10)


def test_a_single_sample_has_a_loss_and_no_comparison(examiner):
    one = replace(examiner, exam=replace(examiner.exam, looks=(1,)))
    best = ask(one).losses
    found = ask(one, best).result
    assert found.loss is not None
    assert found.against is None


def test_a_finalist_has_all_samples(examiner):
    beside = replace(examiner, load=lambda path: None)
    assert ask(beside).result.samples == 10
    assert ask(beside, whole=True, exam_id=full_exam_id(beside.exam_id)).result.samples == 28


def test_every_step_and_every_run_judges_the_same_samples(examiner, exam):
    one, other = ask(examiner, step=1), ask(examiner, step=2)
    assert one.result.loss == other.result.loss
    assert sorted(exam.order.tolist()) == list(range(28))


def test_the_plan_names_what_is_asked(exam):
    plans = {
        exam.id,
        replace(exam, looks=(5, 28)).id,
        replace(exam, order=exam.order[::-1]).id,
        replace(exam, stops=(1, 2)).id,
        replace(exam, metrics=("loss",)).id,
        replace(exam, max_new_tokens=6).id,
        replace(exam, margin=0.5).id,
    }
    assert len(plans) == 7
    assert replace(exam, micro_tokens=1024).id == exam.id  # how, not what


def test_training_is_not_touched(examiner, model):
    model.train()
    state, weights = torch.get_rng_state(), [p.detach().clone() for p in model.parameters()]
    ask(examiner)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, before) for p, before in zip(model.parameters(), weights, strict=True))


def test_only_what_was_asked_is_measured(examiner):
    loss = ask(replace(examiner, exam=replace(examiner.exam, metrics=("loss",))))
    assert (loss.result.metrics, loss.predictions) == ({}, ())
    answers = ask(replace(examiner, exam=replace(examiner.exam, metrics=("exact_match",))))
    assert (answers.result.loss, answers.result.status) == (None, "done")
    assert (answers.result.samples, answers.result.answers) == (0, len(answers.predictions))


def test_the_measured_difference_of_reduced_precision(examiner, model):
    model.float()
    model.compute = torch.bfloat16
    examiner = replace(examiner, check=True)
    said = float(ask(examiner).result.by["float32 differs by"])
    assert 0 < abs(said) < 0.5
    assert model.compute == torch.bfloat16
    assert ask(examiner).result.by["float32 differs by"] == f"{said:.2g}"  # measured once


@pytest.mark.skipif(lacking() is not None, reason=str(lacking()))
def test_operators_that_know_one_dtype_alone_give_way_to_others(examiner, model):
    """As on processors with bfloat16 tiles, where `train` takes them; in float32 they would fail."""
    wide = Decoder(replace(model.sizes, width=32, mlp_width=64), model.origin)
    generator = torch.Generator().manual_seed(3)
    for parameter in wide.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    wide.compute = torch.bfloat16
    bind_operators(wide, compiled=True)
    assert wide.form == "native"
    said = float(ask(replace(examiner, model=wide, check=True)).result.by["float32 differs by"])
    assert 0 < abs(said) < 0.5
    assert (wide.form, wide.compiled, wide.compute) == ("native", True, torch.bfloat16)


def test_what_was_measured_counts_also_where_no_answer_can_be_had(examiner, model):
    model.sizes = replace(model.sizes, max_positions=8)
    result = ask(examiner).result
    assert result.status == "done"
    assert math.isfinite(result.loss)
    assert "the model has 8 positions" in result.reason
    alone = replace(examiner, exam=replace(examiner.exam, metrics=("exact_match",)))
    with pytest.raises(UserError, match="the model has 8 positions") as caught:
        ask(alone)
    assert failed(Request(1, "p", 1, "w"), caught.value).result.status == "failed"


def test_what_nobody_foresaw_in_an_answer_costs_the_answers_alone(examiner, monkeypatch):
    def decode(ids, skip_special=True):
        raise IndexError("piece id is out of range")

    monkeypatch.setattr(examiner.exam.tokenizer, "decode", decode)
    result = ask(examiner).result
    assert (result.status, result.samples) == ("done", 28)
    assert result.reason == "IndexError: piece id is out of range"


def test_out_of_memory_is_a_reason():
    told = failed(Request(1, "p", 1, "w"), MemoryError("no room"))
    assert told.result.reason.startswith("out of memory")


def test_what_a_device_has_come_to_is_not_swallowed(examiner, monkeypatch):
    def decode(ids, skip_special=True):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(examiner.exam.tokenizer, "decode", decode)
    with pytest.raises(RuntimeError, match="CUDA error") as caught:
        ask(examiner)
    with pytest.raises(RuntimeError, match="CUDA error"):
        failed(Request(1, "p", 1, "w"), caught.value)


def test_a_model_that_has_diverged(examiner, model):
    model.head.weight.data[:] = math.nan
    with pytest.raises(UserError, match="not finite"):
        ask(examiner)


def test_passes_of_half_the_size_find_the_same(examiner):
    before = ask(examiner).result.loss
    examiner = replace(examiner, exam=replace(examiner.exam, micro_tokens=128))
    assert examiner.smaller()
    assert examiner.exam.micro_tokens == 64
    assert ask(examiner).result.loss == pytest.approx(before, rel=1e-9)
    assert not examiner.smaller()
