"""An answer whose stop token has no label is found."""

from dataclasses import replace
from pathlib import Path

import pytest

from glm_accelerate.data.encode import TrainOn
from glm_accelerate.data.templates import get_template
from glm_accelerate.data.tokenizers import load_tokenizer
from glm_accelerate.data.types import Conversation, FilePlace, Message, ToolCall
from glm_accelerate.prove.inputs import prove_labels

TALK = (
    Message("user", "q"),
    Message("assistant", "hm"),
    Message("assistant", "", call=ToolCall("f", "{}")),
    Message("observation", "22"),
    Message("assistant", "warm"),
    Message("user", "thanks"),
    Message("assistant", "ok"),
)
CONVERSATIONS = [Conversation(TALK, FilePlace("f", 1)), Conversation((), FilePlace("f", 2), "a document")]


@pytest.mark.parametrize(("train_on", "answers"), [("all", 4), ("last", 2)])
def test_every_answer_ends_with_a_learnt_stop(model_dir: Path, train_on: TrainOn, answers: int) -> None:
    proof = prove_labels(
        CONVERSATIONS, get_template("glm4-0414"), load_tokenizer(model_dir), train_on=train_on
    )
    assert proof.ok
    assert proof.said == f"{answers} answers in 2 samples end with a learnt stop token"


def test_stock_labels_stop_too(model_dir: Path) -> None:
    assert prove_labels(CONVERSATIONS, get_template("glm4"), load_tokenizer(model_dir), labels="stock").ok


def test_a_missing_stop_is_found(model_dir: Path) -> None:
    template = get_template("glm4-0414")
    broken = replace(template, write=lambda messages, prompt: template.write(messages, prompt)[:-1])
    proof = prove_labels(CONVERSATIONS, broken, load_tokenizer(model_dir))
    assert not proof.ok
    assert proof.said == "1 of 2 samples learn an answer without its stop token, first f:1"


def test_an_answer_before_a_system_turn_has_no_stop(model_dir: Path) -> None:
    messages = (Message("user", "q"), Message("assistant", "a"), Message("system", "s"), Message("user", "r"))
    spoken = [Conversation((*messages, Message("assistant", "b")), FilePlace("f", 7))]
    proof = prove_labels(spoken, get_template("glm4"), load_tokenizer(model_dir))
    assert not proof.ok
    assert "f:7" in proof.said


def test_nothing_to_learn(model_dir: Path) -> None:
    nothing = [Conversation(TALK[:1], FilePlace("f", 1))]
    proof = prove_labels(nothing, get_template("glm4"), load_tokenizer(model_dir))
    assert not proof.ok
    assert proof.said == "none of 1 conversations has anything to learn"
