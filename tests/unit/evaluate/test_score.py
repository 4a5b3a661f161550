"""Held-out loss against its definition, intervals against simulation, and exact match that never peeks."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from glm_accelerate.data.pipeline import batches
from glm_accelerate.evaluate import score
from glm_accelerate.evaluate.score import exact_match, held_out_loss, ratio, split, wilson
from glm_accelerate.generate.answer import generate
from glm_accelerate.runtime.errors import UserError

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
    monkeypatch.setattr(score, "CHUNK_BYTES", 0)  # 64 rows at a time: several chunks
    sums = by_definition(model.eval(), samples)
    model.train()
    loss = held_out_loss(model, batches(held(samples), range(len(samples)), batching, micro_tokens))
    assert model.training
    assert loss.mean == pytest.approx(sum(s for s, _ in sums) / sum(n for _, n in sums), rel=1e-12)
    assert loss.targets == sum(n for _, n in sums)
    assert loss.samples == 6  # the seventh has nothing to learn
    means, counts = zip(*[pair for pair in sums if pair[1]], strict=True)
    assert loss.ci95 == pytest.approx(ratio(np.array(means), np.array(counts, float))[1], rel=1e-9)


def test_nothing_to_judge_is_an_error(model, samples, held):
    with pytest.raises(UserError, match="no held-out sample has a target"):
        held_out_loss(model, [])
    with pytest.raises(UserError, match="no held-out sample has a target"):
        held_out_loss(model, batches(held(samples[2:3]), [0], "pack", 64))


def test_one_sample_tells_no_interval(model, samples, held):
    assert held_out_loss(model, batches(held(samples[:1]), [0], "pack", 64)).ci95 is None


def test_the_interval_of_the_loss_covers_the_truth():
    """Long-tailed lengths, losses that depend on them: 95 % of intervals hold the ratio of all."""
    draw = np.random.default_rng(0)
    targets = np.ceil(draw.lognormal(3, 0.8, 100_000))
    losses = targets * (1.5 + draw.gamma(2, 0.4, len(targets)) + 5 / targets)
    truth = losses.sum() / targets.sum()
    covered = 0
    for _ in range(1000):
        chosen = draw.integers(0, len(targets), 200)
        _, interval = ratio(losses[chosen], targets[chosen])
        assert interval is not None
        covered += interval[0] <= truth <= interval[1]
    assert 925 <= covered <= 975


def test_wilson_covers_and_stays_inside():
    draw = np.random.default_rng(0)
    for share in (0.05, 0.5, 0.95):
        intervals = [wilson(int(right), 60) for right in draw.binomial(60, share, 2000)]
        assert sum(low <= share <= high for low, high in intervals) / 2000 > 0.92
    assert wilson(0, 10)[0] == 0 < wilson(0, 10)[1] < 0.31
    assert 0.69 < wilson(10, 10)[0] < wilson(10, 10)[1] <= 1


def test_the_prompt_ends_before_the_last_run_of_targets(sample):
    tokens = [10, 11, 20, 21, STOP, 12, 13, 30, 31, 32, STOP]
    two_turns = sample(tokens, [2, 3, 4, 7, 8, 9, 10])
    assert split(two_turns, {STOP}) == ([10, 11, 20, 21, STOP, 12, 13], [30, 31, 32])
    cut_short = sample(tokens[:-1], [7, 8, 9])
    assert split(cut_short, {STOP}) == (tokens[:7], [30, 31, 32])


def test_no_token_of_the_answer_is_in_the_prompt(model, words, sample):
    """The stock script's fault: the answer stands in the prompt. Here its tokens are unique."""
    one = sample([3, 4, 5, 40, 41, 42, STOP], [3, 4, 5, 6])
    (prediction,) = exact_match(model, [one], words, stops={STOP}, max_new_tokens=4).predictions
    assert prediction.prompt.split() == ["w3", "w4", "w5"]
    assert prediction.reference.split() == ["w40", "w41", "w42"]
    other = dataclasses.replace(one, tokens=np.array([3, 4, 5, 50, 51, 52, STOP], np.int32))
    (again,) = exact_match(model, [other], words, stops={STOP}, max_new_tokens=4).predictions
    assert again.answer == prediction.answer  # what is right has no way into what is said


def test_right_answers_are_counted(model, words, sample):
    """References are what the model says; then every second one is made wrong."""
    prompts = [[n, n + 7, 3 * n] for n in range(3, 13)]
    said = generate(model, prompts, stops={STOP}, max_new_tokens=6)
    assert any(len(answer) == 6 for answer in said)
    cases = []
    for number, (prompt, answer) in enumerate(zip(prompts, said, strict=True)):
        wrong = [(answer[0] - 3 + 1) % 60 + 3, *answer[1:]] if number % 2 else answer
        cases.append(sample([*prompt, *wrong, STOP], range(3, 3 + len(wrong) + 1)))
    matches = exact_match(model, cases, words, stops={STOP}, max_new_tokens=6)
    assert [prediction.right for prediction in matches.predictions] == [True, False] * 5
    assert matches.share == 0.5
    assert matches.ci95 == pytest.approx((0.2366, 0.7634), abs=1e-3)


def test_a_special_token_too_many_is_not_right(model, words, sample):
    """Special tokens of an answer are shown, not skipped: here the model says one that stops nothing."""
    model.norm.weight.data.zero_()  # so that all logits are 0 and the first token wins, number 0
    one = sample([9, 12, STOP], [1, 2])
    (prediction,) = exact_match(model, [one], words, stops={STOP}, max_new_tokens=1).predictions
    assert prediction.answer == "<0>"
    blank = sample([9, 0, STOP], [1, 2])
    (prediction,) = exact_match(model, [blank], words, stops={STOP}, max_new_tokens=1).predictions
    assert (prediction.reference, prediction.right) == ("<0>", True)


def test_documents_have_no_question(model, words, sample):
    whole = sample([3, 4, 5], [0, 1, 2])
    nothing = sample([3, 4, 5], [])
    only_stop = sample([3, 4, STOP], [2])
    with pytest.raises(UserError, match="question and an answer"):
        exact_match(model, [whole, nothing, only_stop], words, stops={STOP}, max_new_tokens=3)


def test_a_loss_that_is_not_finite_says_so(model, samples, held):
    model.head.weight.data[5] = math.nan
    assert math.isnan(held_out_loss(model, batches(held(samples), [0, 1], "pack", 64)).mean)
