"""Conversation -> Sample: render, tokenize all texts of a batch in one call, label, fit into the limit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from glm_accelerate.data import label
from glm_accelerate.data.label import TrainOn
from glm_accelerate.data.limit import TokenizedPiece, chunks, shorten
from glm_accelerate.data.templates import Template
from glm_accelerate.data.tokenizers import Tokenizer
from glm_accelerate.data.types import Conversation, FilePlace, Message, Role, Sample, TextPiece
from glm_accelerate.runtime.errors import UserError

Labels = Literal["exact", "stock"]
Overlong = Literal["truncate", "drop", "error"]
Reason = Literal["no target", "too long", "empty"]


@dataclass(frozen=True, slots=True)
class Kept(Sample):
    """A sample, and whether something of it was cut away."""

    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Left:
    """A line of which nothing is learnt, and why."""

    place: FilePlace
    reason: Reason


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation and its pieces. `moved`: they bear the stock mask, which is yet to be shifted."""

    conversation: Conversation
    pieces: Sequence[TextPiece]
    moved: bool = False


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
    """What follows `render`, for all of a batch at once."""
    encoded: list[Encoded] = []
    batch = _tokenize([one.pieces for one in rendered], tokenizer)
    for one, parts in zip(rendered, batch, strict=True):
        encoded += _fit(one.conversation, parts, one.moved, max_tokens, overlong)
    return encoded


def render(conversation: Conversation, template: Template, train_on: TrainOn, labels: Labels) -> Rendered:
    """UserError with its place for a conversation that the template cannot write."""
    if conversation.text is not None:
        return Rendered(conversation, label.document(conversation, template) if conversation.text else [])
    write = label.stock if labels == "stock" else label.exact
    try:
        pieces = write(conversation.messages, template, train_on)
    except UserError as error:
        raise UserError(error.what, where=conversation.place, cure=error.cure) from error
    except RecursionError as error:  # writing tools and calls needs more of the stack than reading them
        cure = "flatten or remove it"
        raise UserError("a tool or call nested too deeply", where=conversation.place, cure=cure) from error
    return Rendered(conversation, pieces, moved=labels == "stock" and template.name != "chatglm2")


def encode_prompt(messages: Sequence[Message], template: Template, tokenizer: Tokenizer) -> list[int]:
    """What the model is given to answer, up to and including the token that opens its turn."""
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


def _fit(
    conversation: Conversation, parts: list[TokenizedPiece], moved: bool, max_tokens: int, overlong: Overlong
) -> list[Encoded]:
    """`moved`: the parts bear the stock mask, which is shifted by one token and cut at the right."""
    place = conversation.place
    if not parts:
        return [Left(place, "empty" if conversation.text is not None else "no target")]
    size = sum(map(len, parts))
    if size > max_tokens and overlong == "drop":
        return [Left(place, "too long")]
    if size > max_tokens and overlong == "error":
        raise UserError(
            f"{size} tokens, more than data.max_tokens ({max_tokens})",
            where=place,
            cure="raise data.max_tokens, or set data.overlong to truncate or drop",
        )
    if moved:
        tokens, mask = _lay(parts)
        return [_sample(tokens[:max_tokens], label.shift(mask)[:max_tokens], place, size > max_tokens)]
    if size <= max_tokens:
        return [_sample(*_lay(parts), place, False)]
    if conversation.text is not None:
        return [_sample(*_lay(chunk), place, False) for chunk in chunks(parts, max_tokens)]
    roles: list[Role] = [message.role for message in conversation.messages]
    return [_sample(*_lay(shorten(parts, roles, max_tokens)), place, True)]


def _lay(parts: Sequence[TokenizedPiece]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    tokens = np.concatenate([part.tokens for part in parts])
    targets = np.repeat([part.piece.target for part in parts], [len(part) for part in parts])
    return tokens, targets


def _sample(
    tokens: NDArray[np.int32], targets: NDArray[np.bool_], place: FilePlace, truncated: bool
) -> Encoded:
    return Kept(tokens, targets, place, truncated) if targets.any() else Left(place, "no target")
