"""The values that pass through the data line, one frozen type each.

file.jsonl -> Conversation -> [Piece] -> Sample -> (store) -> Batch -> Step

A *target* is a token that is learnt. Everything here is plain numpy: torch enters with the model.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Role = Literal["system", "user", "assistant", "observation"]
Tool = dict[str, Any]

IGNORED = -100  # a position that predicts nothing
DOCUMENT_ALIGNMENT = 64  # rows are rounded up to this, so that shapes repeat


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the assistant makes; `arguments` is the JSON text that the model has to write."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `call` is set on an assistant turn that calls a tool instead of speaking.

    `learnt` is False on an answer that the data excludes: it is read and never a target.
    """

    role: Role
    content: str
    tools: tuple[Tool, ...] = ()
    call: ToolCall | None = None
    learnt: bool = True


@dataclass(frozen=True, slots=True)
class FilePlace:
    """The file and line of something, for messages that a person can act on."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Conversation:
    """One line of a data file, whatever form it was written in. A plain document is `text`."""

    messages: tuple[Message, ...]
    place: FilePlace
    text: str | None = None


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A stretch of a rendered conversation: ordinary text, or one special token by its name.

    Text pieces are tokenized with special tokens switched off, so a role can never be forged from text.
    `turn` counts the messages (-1: the prefix), so that over-long samples can lose whole turns.
    """

    text: str
    special: bool = False
    target: bool = False
    turn: int = -1


@dataclass(frozen=True, slots=True)
class Sample:
    """Token numbers and, for each, whether it is learnt (predicted from those before it)."""

    tokens: NDArray[np.int32]
    targets: NDArray[np.bool_]
    place: FilePlace

    def __post_init__(self) -> None:
        assert self.tokens.shape == self.targets.shape

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, stop) of a document of `whole`, whose other tokens are on other ranks."""

    place: int  # of the document in its step
    start: int
    stop: int
    whole: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of tokens for one forward pass. R rows of T tokens.

    `labels_RT[r, t]` is what position t has to predict (the next token of the same document, if it is a
    target), else IGNORED. `documents[r]` are the lengths that tile row r; documents never see each other.
    The last one of a row may be padding: it predicts nothing. `pieces` are the first of the only row.
    """

    tokens_RT: NDArray[np.int64]
    labels_RT: NDArray[np.int64]
    documents: tuple[tuple[int, ...], ...]
    samples: int
    tokens: int  # unpadded
    targets: int
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """All that one optimizer update learns from. `number` counts from 1 over the whole run.

    `batches` are this rank's; everything else is of the whole step.
    """

    number: int
    epoch: int
    batches: tuple[Batch, ...]
    numbers: tuple[int, ...] = field(repr=False)  # which samples, in the order drawn
    tokens: int
    targets: int
