"""Picking tokens: shares of draws, and what top_p leaves."""

import math

import pytest
import torch

from glm_accelerate.generate.sample import GREEDY, Sampling, greatest, likeliest, pick
from glm_accelerate.runtime.errors import UserError

CPU = torch.device("cpu")


def test_greedy_takes_the_likeliest_of_each_row():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, -1.0, 4.0]])
    assert pick(logits, GREEDY, GREEDY.generator(CPU)).tolist() == [1, 0]


@pytest.mark.parametrize("words", [1, 700, 1024, 1500, 8000, 8191])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_greatest_is_the_first_of_equals(words, dtype):
    logits = torch.randn(9, words, generator=torch.Generator().manual_seed(words)).to(dtype)
    assert torch.equal(greatest(logits), logits.float().argmax(-1))
    for row, place in enumerate((0, words - 1, words // 2, words // 3)):
        logits[row, place:] = 50
        assert greatest(logits)[row] == place
    assert greatest(torch.full((2, words), float("-inf"))).tolist() == [0, 0]


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    shares = torch.tensor([[0.1, 0.5, 0.15, 0.25]])
    assert likeliest(shares, 0.5).tolist() == [[0, 0.5, 0, 0]]
    assert likeliest(shares, 0.6).tolist() == [[0, 0.5, 0, 0.25]]
    assert likeliest(shares, 0.8).tolist()[0] == pytest.approx([0, 0.5, 0.15, 0.25])
    assert likeliest(shares, 1e-9).tolist() == [[0, 0.5, 0, 0]]


def test_draws_follow_temperature_and_top_p():
    shares = torch.tensor([0.5, 0.3, 0.2])
    logits = shares.log().expand(40_000, 3)

    def drawn(sampling: Sampling) -> list[float]:
        tokens = pick(logits, sampling, sampling.generator(CPU))
        return (tokens.bincount(minlength=3) / len(tokens)).tolist()

    assert drawn(Sampling(temperature=1.0)) == pytest.approx([0.5, 0.3, 0.2], abs=0.01)
    squared = [share**2 / 0.38 for share in (0.5, 0.3, 0.2)]
    assert drawn(Sampling(temperature=0.5)) == pytest.approx(squared, abs=0.01)
    assert drawn(Sampling(temperature=1.0, top_p=0.7)) == pytest.approx([5 / 8, 3 / 8, 0], abs=0.01)


def test_hardly_any_temperature_is_none():
    logits = torch.tensor([[3.0, 2.0, 1.0]] * 8)
    assert pick(logits, Sampling(temperature=1e-40), torch.Generator()).tolist() == [0] * 8


@pytest.mark.parametrize("temperature", [-1.0, math.inf, math.nan])
def test_a_temperature_that_means_nothing(temperature):
    with pytest.raises(UserError, match="temperature"):
        Sampling(temperature=temperature)


@pytest.mark.parametrize("top_p", [0.0, 1.1, math.nan])
def test_a_top_p_that_means_nothing(top_p):
    with pytest.raises(UserError, match="top_p"):
        Sampling(top_p=top_p)
