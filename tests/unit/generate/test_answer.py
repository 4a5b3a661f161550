"""Generation against transformers, token for token, and against our own forward pass without a cache."""

import pytest
import torch

from glm_accelerate.config.schema import AdaptSection
from glm_accelerate.generate import answer, decoding
from glm_accelerate.generate.answer import generate, stream
from glm_accelerate.generate.decoding import Decoding, Manner, Row
from glm_accelerate.generate.sample import GREEDY, Sampling
from glm_accelerate.models.adapt import adapt
from glm_accelerate.models.cache import Shelf
from glm_accelerate.runtime.errors import UserError

NEW = 20
# GLM-4 and GLM-4-0414, with and without biases; all, half or a quarter of a head turns; 1 to 6 heads a key.
SHAPES = {
    "glm-biased": ("glm", {"attention_bias": True, "partial_rotary_factor": 0.25}),
    "glm-one-key": ("glm", {"num_key_value_heads": 1}),
    "glm4-biased": ("glm4", {"attention_bias": True, "num_key_value_heads": 3}),
    "glm4-all-keys": ("glm4", {"num_key_value_heads": 6, "partial_rotary_factor": 1.0}),
}


def theirs(model, prompt: list[int], stops: tuple[int, ...] = (1, 2)) -> list[int]:
    """What transformers generates, without the stop token."""
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=list(stops),
        )
    answer = out[0, len(prompt) :].tolist()
    return answer[:-1] if answer and answer[-1] in stops else answer


def uncached(model, prompt: list[int], new: int) -> list[int]:
    """Greedy by definition: the whole sequence again for every token."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(new):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def common_token(answers: list[list[int]]) -> int:
    """One that comes up in the middle of answers, so that stopping at it means something."""
    inner = [token for answer in answers for token in answer[2:-2]]
    return max(set(inner), key=inner.count)


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_greedy_is_what_transformers_generates(pair, prompts, batch):
    wanted = [theirs(pair.theirs, prompt) for prompt in prompts]
    assert any(len(answer) == NEW for answer in wanted)
    got = generate(pair.ours, prompts, stops={1, 2}, max_new_tokens=NEW, batch=batch)
    assert got == wanted


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_greedy_in_float32_in_every_shape(name, make, prompts, tmp_path, monkeypatch):
    """With several rows a slot, few words a pass, and looks at every token and at every fifth."""
    both = make(SHAPES[name][0], torch.float32, tmp_path, **SHAPES[name][1])
    many = [*prompts, *(prompt[::-1] for prompt in prompts)]
    free = [theirs(both.theirs, prompt, (1, 2)) for prompt in many]
    stops = (1, 2, common_token(free))
    wanted = [theirs(both.theirs, prompt, stops) for prompt in many]
    assert len({len(answer) for answer in wanted}) > 2
    monkeypatch.setattr(decoding, "READ", 40)
    for batch in (None, 4):
        assert generate(both.ours, many, stops=stops, max_new_tokens=NEW, batch=batch) == wanted
    monkeypatch.setattr(answer, "manner_of", lambda _: Manner(rows=64, alike=0.3, unseen=5))
    assert generate(both.ours, many, stops=stops, max_new_tokens=NEW, batch=5) == wanted


def test_prompts_that_wait_move_in_and_answers_are_heard_as_they_end(pair, prompts, monkeypatch):
    """Two rows at most, seven prompts: no pass is ever made for a row that has ended."""
    stops = {common_token(generate(pair.ours, prompts, stops=(), max_new_tokens=NEW))}
    wanted = generate(pair.ours, prompts, stops=stops, max_new_tokens=NEW)
    grow, sides, heard = Decoding.grow, list[int](), list[tuple[int, list[int], int]]()

    def watched(self: Decoding, passes: int = 1):
        sides.append(len(self.living))
        return grow(self, passes)

    monkeypatch.setattr(Decoding, "grow", watched)
    got = generate(
        pair.ours,
        prompts,
        stops=stops,
        max_new_tokens=NEW,
        batch=2,
        on_answer=lambda number, answer: heard.append((number, list(answer), len(sides))),
    )
    assert got == wanted
    assert sorted((number, answer) for number, answer, _ in heard) == list(enumerate(wanted))
    assert max(sides) == 2
    said = [min(len(answer) + 1, NEW) - 1 for answer in wanted]  # passes a row takes after its prompt
    assert sum(sides) == sum(said)
    assert len(sides) < sum(said) * 0.75  # mostly two at once
    assert len({when for _, _, when in heard}) > 3
    assert [when for _, _, when in heard] == sorted(when for _, _, when in heard)


def test_answers_that_have_no_room_are_heard_too(pair):
    heard: list[int] = []
    generate(pair.ours, [[5], [6]], stops=(), max_new_tokens=0, on_answer=lambda n, _: heard.append(n))
    assert heard == [0, 1]


def test_several_passes_at_once_say_the_same(pair, prompts):
    def said(passes: list[int]) -> list[list[int]]:
        rows = [Row(number, prompt, NEW) for number, prompt in enumerate(prompts)]
        decoding = Decoding(pair.ours, [Shelf(len(rows), 60)], GREEDY)
        answers = [tokens for _, tokens in decoding.read([(row, 0) for row in rows])]
        for row, tokens in zip(rows, answers, strict=True):
            row.answer += tokens
        for count in passes:
            for row, tokens in decoding.grow(count):
                answers[row.number] += tokens
        return answers

    assert said([6]) == said([1, 1, 1, 1, 1, 1]) == said([2, 4])


def test_every_stop_token_ends_an_answer_and_is_not_part_of_it(pair, prompts):
    free = generate(pair.ours, prompts, stops=(), max_new_tokens=NEW)
    assert all(len(answer) == NEW for answer in free)
    stops = {common_token(free), free[0][3]}
    wanted = [theirs(pair.theirs, prompt, tuple(stops)) for prompt in prompts]
    got = generate(pair.ours, prompts, stops=stops, max_new_tokens=NEW)
    assert got == wanted
    lengths = {len(answer) for answer in got}
    assert len(lengths) > 1  # rows have left the batch at different times
    assert not stops & {token for answer in got for token in answer}


def test_an_answer_does_not_depend_on_its_neighbours(pair, prompts):
    together = generate(pair.ours, prompts, stops={1, 2}, max_new_tokens=NEW)
    alone = [generate(pair.ours, [prompt], stops={1, 2}, max_new_tokens=NEW)[0] for prompt in prompts]
    assert together == alone


def test_a_stream_is_the_same_answer_token_by_token(pair, prompts):
    stops = {common_token(generate(pair.ours, prompts, stops=(), max_new_tokens=NEW))}
    wanted = generate(pair.ours, prompts, stops=stops, max_new_tokens=NEW)
    assert [list(stream(pair.ours, prompt, stops=stops, max_new_tokens=NEW)) for prompt in prompts] == wanted


def test_with_lora_and_with_a_prefix(fresh, prompts):
    for method in ("lora", "prefix"):
        adapt(fresh, AdaptSection(method=method, rank=4, prefix_tokens=5), seed=1)
        for name, parameter in fresh.named_parameters():
            if "lora_B" in name or name.startswith("prefix"):
                parameter.data.normal_(std=0.5, generator=torch.Generator().manual_seed(2))
        wanted = [uncached(fresh.eval(), prompt, 8) for prompt in prompts]
        assert generate(fresh, prompts, stops=(), max_new_tokens=8) == wanted


def test_training_goes_on_as_before(fresh, prompts):
    adapt(fresh, AdaptSection(dropout=0.5), seed=1)
    fresh.train()
    state = torch.get_rng_state()
    first = generate(fresh, prompts, stops=(), max_new_tokens=4)
    assert fresh.training
    assert generate(fresh, prompts, stops=(), max_new_tokens=4) == first  # no dropout
    assert torch.equal(torch.get_rng_state(), state)
    fresh(torch.tensor([prompts[0]])).sum().backward()  # nothing was left in inference mode
    tokens = stream(fresh, prompts[0], stops=(), max_new_tokens=4)
    next(tokens)
    assert not torch.is_inference_mode_enabled()
    tokens.close()  # type: ignore[attr-defined]
    assert fresh.training


def test_an_answer_ends_where_the_models_positions_end(pair):
    prompt = [5] * 60
    assert len(generate(pair.ours, [prompt, [7]], stops=(), max_new_tokens=NEW)[0]) == 4
    assert len(list(stream(pair.ours, prompt, stops=(), max_new_tokens=NEW))) == 4
    for long in ([5] * 64, [5] * 100):
        with pytest.raises(UserError, match=f"prompt 1 has {len(long)} tokens, the model has 64 positions"):
            generate(pair.ours, [[7], long], stops=(), max_new_tokens=NEW)
        with pytest.raises(UserError, match="64 positions"):
            next(stream(pair.ours, long, stops=(), max_new_tokens=NEW))


def test_nothing_asked_nothing_said(pair):
    assert generate(pair.ours, [], stops=(), max_new_tokens=NEW) == []
    assert generate(pair.ours, [[5], [6]], stops=(), max_new_tokens=0) == [[], []]
    with pytest.raises(UserError, match="prompt 1 is empty"):
        generate(pair.ours, [[5], []], stops=(), max_new_tokens=NEW)


def test_sampling_repeats_with_its_seed_only(pair, prompts):
    def answers(seed: int) -> list[list[int]]:
        return generate(
            pair.ours, prompts, stops=(), max_new_tokens=NEW, sampling=Sampling(temperature=5.0, seed=seed)
        )

    assert answers(1) == answers(1)
    assert answers(1) != answers(2)
    cold = Sampling(temperature=1e-4)
    assert generate(pair.ours, prompts, stops=(), max_new_tokens=NEW, sampling=cold) == generate(
        pair.ours, prompts, stops=(), max_new_tokens=NEW, sampling=GREEDY
    )


def test_bfloat16_compute_keeps_its_cache_in_the_dtype_of_attention(fresh, prompts):
    fresh.float()
    fresh.compute = torch.bfloat16
    got = generate(fresh, prompts, stops=(), max_new_tokens=4)
    firsts = [uncached(fresh.eval(), prompt, 1)[0] for prompt in prompts]
    agree = sum(answer[0] == first for answer, first in zip(got, firsts, strict=True))
    assert agree >= len(prompts) - 1  # a near tie may fall either way in bfloat16
