"""Making an over-long sample fit, so that its answer stays.

First whole exchanges go, the oldest before the others and never the system turn; then the middle of the
longest texts of what is left of the prompt; the end of the answer only if it cannot fit with its roles.
An answer that lost its end also loses its stop token: the model must not learn to stop in mid-sentence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from glm_accelerate.data.types import Role, TextPiece

PROMPT_SHARE = 4  # beside an answer that has to be cut anyway, the prompt keeps a quarter of the room


@dataclass(frozen=True, slots=True)
class TokenizedPiece:
    piece: TextPiece
    tokens: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.tokens)


def shorten(parts: Sequence[TokenizedPiece], roles: Sequence[Role], max_tokens: int) -> list[TokenizedPiece]:
    """At most `max_tokens` tokens, with at least one target. `roles[turn]` is the role of a piece's turn."""
    kept = _drop_exchanges(parts, roles, max_tokens)
    start = len(kept)
    while start and kept[start - 1].piece.target:
        start -= 1
    prompt, answer = kept[:start], kept[start:]
    room = max_tokens - _size(answer) - _size([part for part in prompt if part.piece.special])
    if room < 0:
        prompt, answer = _cut_answer(prompt, answer, roles, max_tokens)
    else:
        prompt = _cut_middles(prompt, room)
    shortened = [part for part in (*prompt, *answer) if len(part)]
    assert _size(shortened) <= max_tokens
    assert any(part.piece.target for part in shortened)
    return shortened


def chunks(parts: Sequence[TokenizedPiece], max_tokens: int) -> list[list[TokenizedPiece]]:
    """A long document as several samples, each opening with the prefix: none of its text is lost."""
    prefix = [part for part in parts if not part.piece.target]
    text = [part for part in parts if part.piece.target]
    stream = np.concatenate([part.tokens for part in text])
    size = max_tokens - _size(prefix)
    piece = text[0].piece
    return [[*prefix, TokenizedPiece(piece, stream[at : at + size])] for at in range(0, len(stream), size)]


def _drop_exchanges(
    parts: Sequence[TokenizedPiece], roles: Sequence[Role], max_tokens: int
) -> list[TokenizedPiece]:
    """An exchange is a user's turns and all that follow up to the user's next."""
    number_of_turn: dict[int, int] = {}
    exchange = 0
    previous: Role = "system"
    for turn, role in enumerate(roles):
        if role == "system":
            continue
        exchange += role == "user" and previous not in ("user", "system")
        number_of_turn[turn] = exchange
        previous = role
    sizes = [0] * (exchange + 1)
    last = 0
    for part in parts:
        number = number_of_turn.get(part.piece.turn)
        if number is not None:
            sizes[number] += len(part)
            if not part.piece.special:  # the role token that ends an answer is no exchange of its own
                last = max(last, number)
    total, first = _size(parts), 0
    while total > max_tokens and first < last:
        total -= sizes[first]
        first += 1
    kept: list[TokenizedPiece] = []
    lost = False
    for part in parts:
        if number_of_turn.get(part.piece.turn, first) < first:
            lost = True
            continue
        # The role token after a lost answer ends nothing any more.
        kept.append(_unlearn(part) if lost and part.piece.special and part.piece.turn >= 0 else part)
        lost = False
    return kept


def _cut_middles(parts: Sequence[TokenizedPiece], room: int) -> list[TokenizedPiece]:
    """Texts get `room` tokens together: the longest lose their middle, all down to one level."""
    texts = [part for part in parts if not part.piece.special]
    level = _level([len(part) for part in texts], room)
    cut: list[TokenizedPiece] = []
    broken = False
    for part in parts:
        if part.piece.special:
            cut.append(_unlearn(part) if broken else part)
            broken = False
        elif len(part) > level:
            head, tail = level - level // 2, level // 2
            tokens = np.concatenate([part.tokens[:head], part.tokens[len(part) - tail :]])
            cut.append(_unlearn(TokenizedPiece(part.piece, tokens)))
            broken = True
        else:
            cut.append(_unlearn(part) if broken else part)
    return cut


def _level(sizes: Sequence[int], room: int) -> int:
    """The greatest length to which all sizes can be cut so that they fit into `room`."""
    if sum(sizes) <= room:
        return max(sizes, default=0)
    left = room
    for place, size in enumerate(sorted(sizes)):
        share = left // (len(sizes) - place)
        if size > share:
            return share
        left -= size
    return left


def _cut_answer(
    prompt: Sequence[TokenizedPiece], answer: Sequence[TokenizedPiece], roles: Sequence[Role], max_tokens: int
) -> tuple[list[TokenizedPiece], list[TokenizedPiece]]:
    """The prompt keeps its prefix, the user's last turn and the role that opens the answer."""
    asked = max(
        (p.piece.turn for p in prompt if p.piece.turn >= 0 and roles[p.piece.turn] == "user"), default=-1
    )
    frame = [_unlearn(part) for part in prompt[:-1] if part.piece.turn in (-1, asked)] + list(prompt[-1:])
    specials = _size([part for part in frame if part.piece.special])
    texts = _size(frame) - specials
    share = max(0, min(texts, max_tokens // PROMPT_SHARE - specials))
    frame = _cut_middles(frame, share)
    room = max_tokens - _size(frame)
    kept: list[TokenizedPiece] = []
    for part in answer:
        if len(part) > room:
            break
        kept.append(part)
        room -= len(part)
    else:  # it fits now that the roles between are gone
        return frame, kept
    cut = answer[len(kept)]
    return frame, [*kept, TokenizedPiece(cut.piece, cut.tokens[:room])]


def _unlearn(part: TokenizedPiece) -> TokenizedPiece:
    return TokenizedPiece(replace(part.piece, target=False), part.tokens) if part.piece.target else part


def _size(parts: Sequence[TokenizedPiece]) -> int:
    return sum(map(len, parts))
