"""Which pieces of a conversation are learnt: never those of an answer that the data excludes.

exact: all that the model has to produce, and nothing is kept after the last of it.
stock: what the stock fine-tuning scripts label, token for token, their oddities included, to compare with.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from glm_accelerate.data.templates.template import ASSISTANT, Template
from glm_accelerate.data.types import Conversation, Message, TextPiece

TrainOn = Literal["all", "last"]


def exact(messages: Sequence[Message], template: Template, train_on: TrainOn) -> list[TextPiece]:
    """Rendered pieces; empty if there is nothing to learn."""
    pieces = template.render(messages)
    if train_on == "last":
        opened = _last_answer(pieces)
        pieces = [replace(piece, target=piece.target and at > opened) for at, piece in enumerate(pieces)]
    learnt = [at for at, piece in enumerate(pieces) if piece.target]
    return pieces[: learnt[-1] + 1] if learnt else []


def document(conversation: Conversation, template: Template) -> list[TextPiece]:
    """A plain text: everything after the prefix is learnt, its end included."""
    assert conversation.text is not None
    prefix = [TextPiece(name, special=True) for name in template.prefix]
    end = TextPiece(template.end_of_text, special=True, target=True, turn=0)
    return [*prefix, TextPiece(conversation.text, target=True, turn=0), end]


def stock(messages: Sequence[Message], template: Template, train_on: TrainOn) -> list[TextPiece]:
    """Pieces whose `target` is the stock script's mask before it is moved; `shift` moves it.

    With `combine: false` every message is rendered by itself and masked by its role; with `combine: true`
    (here `train_on: last`) the conversation is rendered whole and masked after the last `<|assistant|>`.
    """
    if template.name == "chatglm2":  # its script labels just the answer and the stop token
        return exact(messages, template, train_on)
    if template.name == "glm4-0414":  # stock never hands tools to this template
        messages = [replace(message, tools=()) for message in messages]
    stop = TextPiece(template.stop, special=True)
    if train_on == "last":
        pieces = template.render(messages)
        if pieces[-1].special and pieces[-1].turn >= 0:
            pieces.pop()  # our own stop token
        opened = _last_answer(pieces)
        learnt = opened >= 0 and messages[pieces[opened].turn].learnt
        return [*(replace(piece, target=learnt and opened < at) for at, piece in enumerate(pieces)), stop]
    pieces = [TextPiece(name, special=True) for name in template.prefix]
    trained = {"assistant", "observation"} if template.name == "chatglm3" else {"assistant"}
    for turn, message in enumerate(messages):
        alone = template.render([message])[len(template.prefix) :]
        if message.role == "assistant" and alone:
            alone.pop()
        learnt = message.role in trained and message.learnt
        pieces += [replace(piece, target=learnt, turn=turn) for piece in alone]
    return [*pieces, stop]


def shift(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The stock mask says of a token that the one after it is learnt."""
    return np.concatenate([np.zeros(1, np.bool_), mask[:-1]])


def _last_answer(pieces: Sequence[TextPiece]) -> int:
    """Where the last answer is opened; -1 if nowhere. ChatGLM2 opens none, and has but one."""
    return max(
        (at for at, piece in enumerate(pieces) if piece.special and piece.text == ASSISTANT), default=-1
    )
