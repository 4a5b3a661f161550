"""ChatGLM2: `[gMASK]sop`, one text of rounds `[Round 1]\\n\\n问：...\\n\\n答：...\\n\\n`, then the answer.

Earlier answers stand inside the prompt's text and end with a new round instead of a stop token, so only
the last answer can be learnt, as in the original script. There are no roles, hence no tools.
"""

from collections.abc import Sequence

from glm_accelerate.data.templates.template import Template, opening
from glm_accelerate.data.types import Message, TextPiece
from glm_accelerate.runtime.errors import UserError

_CURE = "ChatGLM2 knows user and assistant in turn, after an optional system text"


def _write(messages: Sequence[Message], generation_prompt: bool) -> list[TextPiece]:
    system, rest = _split(messages)
    answered = rest[:-1] if rest[-1].role == "assistant" else rest
    if generation_prompt and answered is not rest:
        raise UserError("a prompt ends with an answer", cure=_CURE)
    prompt = "".join(f"{text}\n\n" for text in system)
    for place, message in enumerate(answered):
        expected = "assistant" if place % 2 else "user"
        if message.role != expected:
            raise UserError(f"{message.role} where {expected} was expected", cure=_CURE)
        first = f"[Round {place // 2 + 1}]\n\n问：{message.content}\n\n答："
        prompt += f"{message.content}\n\n" if place % 2 else first
    if len(answered) % 2 == 0:
        raise UserError("an answer without a question", cure=_CURE)
    turn = len(messages) - 1
    pieces = [*opening(CHATGLM2.prefix), TextPiece(prompt, turn=turn)]
    if answered is not rest:
        learnt = rest[-1].learnt
        pieces.append(TextPiece(rest[-1].content, target=learnt, turn=turn))
        pieces.append(TextPiece("</s>", special=True, target=learnt, turn=turn))
    return pieces


def _split(messages: Sequence[Message]) -> tuple[list[str], list[Message]]:
    if any(message.tools or message.call or message.role == "observation" for message in messages):
        raise UserError("ChatGLM2 cannot call tools", cure="use ChatGLM3 or newer, or leave these lines out")
    opened = next((at for at, message in enumerate(messages) if message.role != "system"), len(messages))
    rest = list(messages[opened:])
    if not rest:
        raise UserError("a conversation without a question", cure=_CURE)
    return [message.content for message in messages[:opened]], rest


CHATGLM2 = Template(
    name="chatglm2",
    prefix=("[gMASK]", "sop"),
    stops=("</s>",),
    stop="</s>",
    end_of_text="</s>",
    write=_write,
)
