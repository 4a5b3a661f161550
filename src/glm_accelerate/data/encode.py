"""Conversation -> Sample: render, choose what is learnt, tokenize a batch in one call, fit into the limit.

An answer that the data excludes is never learnt. exact: all that the model has to produce, and nothing is
kept after the last of it. stock: what the stock fine-tuning scripts label, token for token, their oddities
included, to compare with.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from glm_accelerate.data.limit import TokenizedPiece, chunks, shorten
from glm_accelerate.data.templates.template import ASSISTANT, Template, prefix_pieces
from glm_accelerate.data.tokenizers import Tokenizer
from glm_accelerate.data.types import Conversation, FilePlace, Message, Role, Sample, TextPiece
from glm_accelerate.runtime.errors import UserError

TrainOn = Literal["all", "last"]
Labels = Literal["exact", "stock"]
Overlong = Literal["truncate", "drop", "error"]
Reason = Literal["no target", "too long", "empty"]


@dataclass(frozen=True, slots=True)
class Kept(Sample):
    """A sample. `cut_from`: how many tokens it had if part of it was cut away."""

    cut_from: int = 0

    @property
    def truncated(self) -> bool:
        return self.cut_from > 0


@dataclass(frozen=True, slots=True)
class Left:
    """A line of which nothing is learnt, and why. `tokens`: of one that is too long."""

    place: FilePlace
    reason: Reason
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation and its pieces. `stock_mask`: their targets are the stock mask, not yet shifted."""

    conversation: Conversation
    pieces: Sequence[TextPiece]
    stock_mask: bool = False


Encoded = Kept | Left


def encode(
    conversations: Sequence[Conversation],
    template: Template,
    tokenizer: Tokenizer,
    *,
    train_on: TrainOn = "all",
    labels: Labels = "exact",
    max_tokens: int,
    overlong: Overlong = "truncate",
) -> list[Encoded]:
    """In order, one a conversation; only a document longer than `max_tokens` becomes several samples."""
    rendered = [render(conversation, template, train_on, labels) for conversation in conversations]
    return encode_rendered(rendered, tokenizer, max_tokens=max_tokens, overlong=overlong)


def encode_rendered(
    rendered: Sequence[Rendered], tokenizer: Tokenizer, *, max_tokens: int, overlong: Overlong
) -> list[Encoded]:
    """The samples of rendered conversations, all tokenized at once."""
    encoded: list[Encoded] = []
    batch = _tokenize([one.pieces for one in rendered], tokenizer)
    for one, parts in zip(rendered, batch, strict=True):
        encoded += _fit(one, parts, max_tokens, overlong)
    return encoded


def render(conversation: Conversation, template: Template, train_on: TrainOn, labels: Labels) -> Rendered:
    """UserError with its place for a conversation that the template cannot write."""
    if conversation.text is not None:
        return Rendered(conversation, _document_pieces(conversation.text, template))
    stock = labels == "stock" and template.name != "chatglm2"  # whose script labels as we do
    write = _stock_pieces if stock else _exact_pieces
    try:
        return Rendered(conversation, write(conversation.messages, template, train_on), stock)
    except UserError as error:
        raise UserError(error.what, where=conversation.place, cure=error.cure) from error
    except RecursionError as error:  # writing tools and calls needs more of the stack than reading them
        cure = "flatten or remove it"
        raise UserError("a tool or call nested too deeply", where=conversation.place, cure=cure) from error


def _document_pieces(text: str, template: Template) -> list[TextPiece]:
    """Everything after the prefix is learnt, the end included."""
    end = TextPiece(template.end_of_text, special=True, target=True, turn=0)
    return [*prefix_pieces(template), TextPiece(text, target=True, turn=0), end] if text else []


def _exact_pieces(messages: Sequence[Message], template: Template, train_on: TrainOn) -> list[TextPiece]:
    """Empty if there is nothing to learn."""
    pieces = template.render(messages)
    if train_on == "last":
        start = _last_answer(pieces)
        pieces = [replace(piece, target=piece.target and at > start) for at, piece in enumerate(pieces)]
    targets = [at for at, piece in enumerate(pieces) if piece.target]
    return pieces[: targets[-1] + 1] if targets else []


def _stock_pieces(messages: Sequence[Message], template: Template, train_on: TrainOn) -> list[TextPiece]:
    """Pieces whose `target` is the stock script's mask before it is shifted.

    With `combine: false` every message is rendered by itself and masked by its role; with `combine: true`
    (here `train_on: last`) the conversation is rendered whole and masked after the last `<|assistant|>`.
    """
    if template.name == "glm4-0414":  # stock never hands tools to this template
        messages = [replace(message, tools=()) for message in messages]
    stop = TextPiece(template.stop, special=True)
    if train_on == "last":
        pieces = template.render(messages)
        if pieces[-1].special and pieces[-1].turn >= 0:
            pieces.pop()  # our own stop token
        start = _last_answer(pieces)
        learnt = start >= 0 and messages[pieces[start].turn].learnt
        return [*(replace(piece, target=learnt and start < at) for at, piece in enumerate(pieces)), stop]
    pieces = prefix_pieces(template)
    trained = {"assistant", "observation"} if template.name == "chatglm3" else {"assistant"}
    for turn, message in enumerate(messages):
        alone = template.render([message])[len(template.prefix) :]
        if message.role == "assistant" and alone:
            alone.pop()
        learnt = message.role in trained and message.learnt
        pieces += [replace(piece, target=learnt, turn=turn) for piece in alone]
    return [*pieces, stop]


def _last_answer(pieces: Sequence[TextPiece]) -> int:
    """Where the last answer opens; -1 if nowhere. ChatGLM2 has one answer and no token that opens it."""
    return max(
        (at for at, piece in enumerate(pieces) if piece.special and piece.text == ASSISTANT), default=-1
    )


def encode_prompt(messages: Sequence[Message], template: Template, tokenizer: Tokenizer) -> list[int]:
    """The prompt's tokens, up to and including the one that opens the answer."""
    return encode_whole(template.render(messages, generation_prompt=True), tokenizer)


def encode_whole(pieces: Sequence[TextPiece], tokenizer: Tokenizer) -> list[int]:
    """The tokens of rendered pieces, whatever they are for."""
    [parts] = _tokenize([pieces], tokenizer)
    return np.concatenate([part.tokens for part in parts]).tolist()


def _tokenize(rendered: Sequence[Sequence[TextPiece]], tokenizer: Tokenizer) -> list[list[TokenizedPiece]]:
    texts = [piece.text for pieces in rendered for piece in pieces if not piece.special]
    numbers = iter(tokenizer.encode(texts) if texts else [])
    special: dict[str, NDArray[np.int32]] = {}
    batch: list[list[TokenizedPiece]] = []
    for pieces in rendered:
        parts: list[TokenizedPiece] = []
        for piece in pieces:
            if not piece.special:
                parts.append(TokenizedPiece(piece, np.array(next(numbers), np.int32)))
                continue
            if piece.text not in special:
                special[piece.text] = np.array([tokenizer.special(piece.text)], np.int32)
            parts.append(TokenizedPiece(piece, special[piece.text]))
        batch.append(parts)
    return batch


def _fit(one: Rendered, parts: list[TokenizedPiece], max_tokens: int, overlong: Overlong) -> list[Encoded]:
    conversation, place = one.conversation, one.conversation.place
    if not parts:
        return [Left(place, "empty" if conversation.text is not None else "no target")]
    size = sum(map(len, parts))
    if size > max_tokens and overlong == "drop":
        return [Left(place, "too long", size)]
    if size > max_tokens and overlong == "error":
        raise UserError(
            f"{size} tokens, more than data.max_tokens ({max_tokens})",
            where=place,
            cure="raise data.max_tokens, or set data.overlong to truncate or drop",
        )
    cut_from = size if size > max_tokens else 0
    if one.stock_mask:  # it says of a token that the one after it is learnt; cut at the right
        tokens, mask = _lay(parts)
        targets = np.concatenate([np.zeros(1, np.bool_), mask[:-1]])
        return [_sample(tokens[:max_tokens], targets[:max_tokens], place, cut_from)]
    if size <= max_tokens:
        return [_sample(*_lay(parts), place)]
    if conversation.text is not None:
        return [_sample(*_lay(chunk), place) for chunk in chunks(parts, max_tokens)]
    roles: list[Role] = [message.role for message in conversation.messages]
    return [_sample(*_lay(shorten(parts, roles, max_tokens)), place, cut_from)]


def _lay(parts: Sequence[TokenizedPiece]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    tokens = np.concatenate([part.tokens for part in parts])
    targets = np.repeat([part.piece.target for part in parts], [len(part) for part in parts])
    return tokens, targets


def _sample(
    tokens: NDArray[np.int32], targets: NDArray[np.bool_], place: FilePlace, cut_from: int = 0
) -> Encoded:
    return Kept(tokens, targets, place, cut_from) if targets.any() else Left(place, "no target")
