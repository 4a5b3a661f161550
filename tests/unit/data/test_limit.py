"""An over-long sample fits afterwards, and its answer is still there."""

import random
from pathlib import Path

import numpy as np
import pytest

from glm_accelerate.data.encode import Kept, encode
from glm_accelerate.data.templates import get_template
from glm_accelerate.data.tokenizers import Tokenizer, load_tokenizer
from glm_accelerate.data.types import Conversation, FilePlace, Message, Role, ToolCall

PLACE = FilePlace("f", 1)


@pytest.fixture
def tokenizer(fast_dir: Path) -> Tokenizer:
    return load_tokenizer(fast_dir)


def cut(
    messages: list[Message], max_tokens: int, tokenizer: Tokenizer, name: str = "glm4-0414"
) -> tuple[Kept, str]:
    [sample] = encode(
        [Conversation(tuple(messages), PLACE)], get_template(name), tokenizer, max_tokens=max_tokens
    )
    assert isinstance(sample, Kept)
    assert len(sample) <= max_tokens
    return sample, tokenizer.decode(sample.tokens.tolist(), skip_special=False)


def test_oldest_exchanges_go_first_and_the_system_turn_stays(tokenizer: Tokenizer) -> None:
    messages = [Message("system", "kind")]
    for turn in range(6):
        messages += [Message("user", f"question {turn}"), Message("assistant", f"answer {turn}")]
    sample, text = cut(messages, 60, tokenizer)
    assert sample.truncated
    assert text.startswith("[gMASK]<sop><|system|>\nkind<|user|>\nquestion ")
    assert text.endswith("question 5<|assistant|>\nanswer 5<|user|>")
    assert "question 0" not in text
    first = sample.tokens.tolist().index(tokenizer.special("<|user|>"))
    assert not sample.targets[first]  # the answer that this role token ended is gone
    kept = text.count("question ")
    fewer, _ = cut(messages, len(sample) - 1, tokenizer)
    assert tokenizer.decode(fewer.tokens.tolist()).count("question ") == kept - 1


def test_then_the_middle_of_the_prompt(tokenizer: Tokenizer) -> None:
    long = "BEGIN " + "The weather in Paris " * 80 + " END"
    sample, text = cut([Message("user", long), Message("assistant", "It is warm.")], 64, tokenizer)
    assert text.startswith("[gMASK]<sop><|user|>\nBEGIN The")
    assert text.endswith(" END<|assistant|>\nIt is warm.<|user|>")
    assert (
        tokenizer.decode(sample.tokens[sample.targets].tolist(), skip_special=False)
        == "\nIt is warm.<|user|>"
    )
    assert len(sample) == 64


def test_the_longest_texts_are_cut_and_short_ones_left(tokenizer: Tokenizer) -> None:
    messages = [
        Message("user", "short question"),
        Message("assistant", "", call=ToolCall("f", "{}")),
        Message("observation", "result " * 200),
        Message("assistant", "done"),
    ]
    sample, text = cut(messages, 80, tokenizer, "glm4")
    assert "short question<|assistant|>f\n{}<|observation|>" in text
    learnt = tokenizer.decode(sample.tokens[sample.targets].tolist(), skip_special=False)
    assert learnt == "f\n{}<|observation|>\ndone<|user|>"


def test_an_answer_without_its_end_has_no_stop_token(tokenizer: Tokenizer) -> None:
    sample, text = cut([Message("user", "why? " * 50), Message("assistant", "because " * 200)], 64, tokenizer)
    assert len(sample) == 64
    assert text.startswith("[gMASK]<sop><|user|>\nwhy?")
    assert "<|assistant|>\nbecause because" in text
    assert sample.targets[-1]
    assert sample.tokens[-1] not in [tokenizer.special(name) for name in get_template("glm4").stops]
    assert sample.targets.sum() >= 40  # three quarters are the answer's


def test_chatglm2_loses_the_middle_of_its_text(sentence_dir: Path) -> None:
    tokenizer = load_tokenizer(sentence_dir)
    sample, _ = cut(
        [Message("user", "question " * 300), Message("assistant", "a")], 64, tokenizer, "chatglm2"
    )
    assert tokenizer.decode(sample.tokens[sample.targets].tolist()) == "a"


def test_a_question_after_the_last_answer_is_no_exchange(tokenizer: Tokenizer) -> None:
    messages = [
        Message("user", "first"),
        Message("assistant", "one"),
        Message("user", "second"),
        Message("assistant", "word " * 80),
        Message("user", "never answered"),
    ]
    sample, text = cut(messages, 48, tokenizer)
    assert text.startswith("[gMASK]<sop><|user|>\nsecond<|assistant|>\nword word")
    assert sample.targets[-1]


@pytest.mark.parametrize("name", ["glm4", "glm4-0414", "chatglm3", "chatglm2"])
def test_any_conversation_that_ends_anyhow_fits_any_limit(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = load_tokenizer(
        request.getfixturevalue("sentence_dir" if name.startswith("chatglm") else "fast_dir")
    )
    dice = random.Random(2)
    ends: list[Role] = ["user", "observation", "system", "assistant"]
    learnt = 0
    for _ in range(300):
        messages = [Message("system", "word " * dice.choice([1, 20]))] * dice.randint(0, 1)
        for _ in range(dice.randint(1, 5)):
            answer = Message("assistant", "end " * dice.choice([1, 30, 90]), learnt=dice.random() < 0.7)
            messages += [Message("user", "word " * dice.choice([1, 3, 40])), answer]
        if name != "chatglm2":
            messages += [
                Message(dice.choice(ends), "more " * dice.choice([1, 30])) for _ in range(dice.randint(0, 3))
            ]
        elif dice.random() < 0.5:
            messages.append(Message("user", "more"))
        limit = dice.choice([16, 17, 33, 64, 200])
        [sample] = encode(
            [Conversation(tuple(messages), PLACE)], get_template(name), tokenizer, max_tokens=limit
        )
        if isinstance(sample, Kept):
            assert len(sample) <= limit
            assert sample.targets.any()
            learnt += 1
        else:
            assert name == "chatglm2" or not any(m.learnt for m in messages if m.role == "assistant")
    assert learnt > 75


@pytest.mark.parametrize("name", ["glm4", "glm4-0414", "chatglm3"])
def test_any_conversation_fits_any_limit(name: str, request: pytest.FixtureRequest) -> None:
    kind = "sentence_dir" if name == "chatglm3" else "fast_dir"
    tokenizer = load_tokenizer(request.getfixturevalue(kind))
    dice = random.Random(1)
    opened = tokenizer.special("<|assistant|>")
    stops = [tokenizer.special(stop) for stop in get_template(name).stops]
    roles: list[Role] = ["user", "user", "assistant", "observation", "assistant", "system"]
    for _ in range(300):
        messages = [
            Message(dice.choice(roles), "word " * dice.choice([1, 3, 40])) for _ in range(dice.randint(1, 12))
        ]
        messages.append(Message("assistant", "end " * dice.choice([1, 30])))
        sample, _ = cut(messages, dice.choice([16, 17, 33, 64, 200]), tokenizer, name)
        tokens = sample.tokens.tolist()
        assert sample.targets.any()
        assert opened in tokens
        assert tokens[0] == tokenizer.special("[gMASK]")
        first = np.flatnonzero(sample.targets)[0]
        assert tokens[first] not in stops  # a stop is learnt only where an answer stands before it
