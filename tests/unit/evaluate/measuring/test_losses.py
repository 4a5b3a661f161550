"""Losses against their definition, of our models and of any module, and where a sample is cut to be asked."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from glm_accelerate.data.pipeline import batches, empty_batch
from glm_accelerate.evaluate.measuring import losses as measured
from glm_accelerate.evaluate.measuring.losses import document_losses, sample_losses, split

STOP = 1


def by_definition(model, samples) -> list[tuple[float, int]]:
    """Each sample alone: the sum of its targets' losses, and their number."""
    sums = []
    with torch.no_grad():
        for one in samples:
            tokens = torch.from_numpy(one.tokens).long()
            learnt = torch.from_numpy(one.targets)[1:]
            losses = cross_entropy(model(tokens[None])[0, :-1], tokens[1:], reduction="none")
            sums.append((float(losses[learnt].sum()), int(learnt.sum())))
    return sums


@pytest.mark.parametrize("batching", ["pack", "bucket", "pad"])
@pytest.mark.parametrize("micro_tokens", [64, 128, 1024])
def test_loss_is_the_mean_over_all_targets(model, samples, held, batching, micro_tokens, monkeypatch):
    monkeypatch.setattr(measured, "CHUNK_BYTES", 0)  # 64 rows at a time: several chunks
    sums = by_definition(model.eval(), samples)
    model.train()
    found = [
        document_losses(model, batch)
        for batch in batches(held(samples), range(len(samples)), batching, micro_tokens)
    ]
    losses, targets = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    assert model.training
    assert losses.sum() == pytest.approx(sum(s for s, _ in sums), rel=1e-12)
    assert targets.sum() == sum(n for _, n in sums)
    assert np.count_nonzero(targets) == 6  # the seventh has nothing to learn


def test_the_prompt_ends_before_the_last_run_of_targets(sample):
    tokens = [10, 11, 20, 21, STOP, 12, 13, 30, 31, 32, STOP]
    two_turns = sample(tokens, [2, 3, 4, 7, 8, 9, 10])
    assert split(two_turns, {STOP}) == ([10, 11, 20, 21, STOP, 12, 13], [30, 31, 32])
    cut_short = sample(tokens[:-1], [7, 8, 9])
    assert split(cut_short, {STOP}) == (tokens[:7], [30, 31, 32])


def test_documents_have_no_question(sample):
    opened_only = sample([3, 4, 5, 6, STOP], [2, 3, 4])  # a template's opening, then a document
    whole = sample([3, 4, 5], [0, 1, 2])
    nothing = sample([3, 4, 5], [])
    only_stop = sample([3, 4, 5, STOP], [3])
    assert [split(one, {STOP}) for one in (opened_only, whole, nothing, only_stop)] == [None] * 4


@pytest.mark.parametrize("batching", ["pack", "bucket", "pad"])
def test_losses_of_documents_stand_in_the_order_of_the_batch(model, samples, held, batching):
    """Row after row; a row's padding is one more document, without targets."""
    model.eval()
    sums = by_definition(model, samples)
    seen = []
    for batch in batches(held(samples), range(len(samples)), batching, 64):
        losses_D, targets_D = document_losses(model, batch)
        assert len(losses_D) == len(targets_D) == sum(map(len, batch.documents))
        seen += losses_D[targets_D > 0].tolist()
        assert not losses_D[targets_D == 0].any()
    assert sorted(seen) == pytest.approx(sorted(loss for loss, count in sums if count), rel=1e-12)
    one_row = next(iter(batches(held(samples), range(len(samples)), "pack", 1024)))
    losses_D, targets_D = document_losses(model, one_row)
    assert losses_D[: len(samples)] == pytest.approx([loss for loss, _ in sums], rel=1e-12)
    assert targets_D.tolist()[: len(samples)] == [count for _, count in sums]


def test_any_module_is_measured_alike(model, samples):
    """All that is asked of it is logits: ours, and one of torch's own that knows nothing of a decoder."""
    items = sample_losses(model.eval(), samples)
    sums = by_definition(model, samples)
    assert items.losses_N == pytest.approx([loss for loss, _ in sums], rel=1e-12)
    assert items.targets_N.tolist() == [count for _, count in sums]
    torch.manual_seed(0)
    other = torch.nn.Sequential(torch.nn.Embedding(67, 8), torch.nn.Linear(8, 67)).bfloat16()
    half = sample_losses(other, samples)
    assert half.losses_N == pytest.approx(
        [loss for loss, _ in by_definition(other.double(), samples)], rel=0.02
    )
    assert half.losses_N[2] == half.targets_N[2] == 0  # it has no target


def test_a_loss_that_is_not_finite_says_so(model, samples, held):
    model.head.weight.data[5] = math.nan
    (batch,) = batches(held(samples), [0, 1], "pack", 64)
    assert math.isnan(document_losses(model, batch)[0].sum())


def test_a_pass_without_samples_measures_nothing(model):
    """What a rank without a share goes through beside the others."""
    losses_D, targets_D = document_losses(model, empty_batch())
    assert (losses_D.tolist(), targets_D.tolist()) == ([0.0], [0.0])
