"""What a template is: a function from messages to pieces, and the names of the tokens around them.

messages -> [prefix] [role][text] [role][text] ... [stop]      what the model has to produce is a target
A role token ends the answer before it, so it is a target there; the model itself writes what follows
`<|assistant|>`, line end included.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from glm_accelerate.data.types import Message, Role, TextPiece, Tool
from glm_accelerate.runtime.errors import UserError

ASSISTANT = "<|assistant|>"
OBSERVATION = "<|observation|>"


@dataclass(frozen=True, slots=True)
class RoleBlock:
    """One role token and the texts after it, each tokenized by itself.

    `calls`: the turn calls a tool; `learnt`: an answer is a target, its end included.
    """

    role: Role
    texts: tuple[str, ...]
    turn: int
    calls: bool = False
    learnt: bool = True


@dataclass(frozen=True, slots=True)
class Template:
    """How a family writes a conversation: `write(messages, generation_prompt)` gives its pieces, which end
    with a last assistant turn's stop token, a target, or open a turn for the model. Other names are names of
    special tokens.
    """

    name: str
    prefix: tuple[str, ...]
    stops: tuple[str, ...]  # any of these ends an answer
    stop: str  # written after the last answer
    end_of_text: str  # written after a plain document
    write: Callable[[Sequence[Message], bool], list[TextPiece]]
    version: int = 2  # raise it when another text is written: data prepared before are then not used

    def render(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> list[TextPiece]:
        """The pieces of a conversation."""
        return self.write(messages, generation_prompt)


def prefix_pieces(template: Template) -> list[TextPiece]:
    return [TextPiece(name, special=True) for name in template.prefix]


def join(template: Template, blocks: Sequence[RoleBlock], generation_prompt: bool) -> list[TextPiece]:
    """The pieces of all blocks in order, targets marked."""
    pieces = prefix_pieces(template)
    enders = {*template.stops, ASSISTANT}  # after a thought the model may open the next turn of its own
    answering = calling = learning = False
    for block in blocks:
        name = f"<|{block.role}|>"
        pieces.append(TextPiece(name, special=True, target=learning and name in enders, turn=block.turn))
        answering, calling = block.role == "assistant", block.calls
        learning = answering and block.learnt
        pieces += [TextPiece(text, target=learning, turn=block.turn) for text in block.texts if text]
    if generation_prompt:
        pieces.append(TextPiece(ASSISTANT, special=True, target=learning, turn=len(blocks)))
    elif answering:
        stop = OBSERVATION if calling else template.stop
        pieces.append(TextPiece(stop, special=True, target=learning, turn=blocks[-1].turn))
    return pieces


def function_of(tool: Tool) -> dict[str, Any]:
    """The description of a function, with or without OpenAI's wrapping."""
    if tool.get("type", "function") != "function":
        raise UserError(
            f"a tool of type {tool['type']!r} cannot be written",
            cure='describe it as {"type": "function", ...}',
        )
    function = tool.get("function", tool)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError("a tool has no name", cure='{"type": "function", "function": {"name": ..., ...}}')
    return function
