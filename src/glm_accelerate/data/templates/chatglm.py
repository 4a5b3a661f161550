"""ChatGLM2, whose prompt is one text of rounds, and ChatGLM3, which has role tokens."""

import json
from collections.abc import Sequence

from glm_accelerate.data import strict_json
from glm_accelerate.data.templates.template import RoleBlock, Template, join, prefix_pieces
from glm_accelerate.data.types import Message, TextPiece, ToolCall
from glm_accelerate.runtime.errors import UserError

_TOOLS = "Answer the following questions as best as you can. You have access to the following tools:"
_CURE = "ChatGLM2 knows user and assistant in turn, after an optional system text"


def _write_rounds(messages: Sequence[Message], generation_prompt: bool) -> list[TextPiece]:
    """`[gMASK]sop`, the text of rounds `[Round 1]\\n\\n问：...\\n\\n答：...\\n\\n`, then the answer.

    Earlier answers are part of the prompt's text and end with a new round instead of a stop token, so only
    the last answer can be learnt, as in the original script. There are no roles, hence no tools.
    """
    if any(message.tools or message.call or message.role == "observation" for message in messages):
        raise UserError("ChatGLM2 cannot call tools", cure="use ChatGLM3 or newer, or leave these lines out")
    start = next((at for at, message in enumerate(messages) if message.role != "system"), len(messages))
    prompted = list(messages[start:])
    if not prompted:
        raise UserError("a conversation without a question", cure=_CURE)
    answer = prompted.pop() if prompted[-1].role == "assistant" else None
    if generation_prompt and answer:
        raise UserError("a prompt ends with an answer", cure=_CURE)
    prompt = "".join(f"{message.content}\n\n" for message in messages[:start])
    for number, message in enumerate(prompted):
        expected = "assistant" if number % 2 else "user"
        if message.role != expected:
            raise UserError(f"{message.role} where {expected} was expected", cure=_CURE)
        question = f"[Round {number // 2 + 1}]\n\n问：{message.content}\n\n答："
        prompt += f"{message.content}\n\n" if number % 2 else question
    if len(prompted) % 2 == 0:
        raise UserError("an answer without a question", cure=_CURE)
    turn = len(messages) - 1
    pieces = [*prefix_pieces(CHATGLM2), TextPiece(prompt, turn=turn)]
    if answer:
        pieces.append(TextPiece(answer.content, target=answer.learnt, turn=turn))
        pieces.append(TextPiece("</s>", special=True, target=answer.learnt, turn=turn))
    return pieces


def _write_roles(messages: Sequence[Message], generation_prompt: bool) -> list[TextPiece]:
    """`[gMASK]sop`, then `<|role|>{tool name}\\n` and `{content}`, two pieces tokenized separately.

    SentencePiece puts a space before every piece, so the tokens show where pieces begin. A call is Python:
    the tool's name, then `tool_call(argument=value)` in a fenced block.
    """
    blocks: list[RoleBlock] = []
    for turn, message in enumerate(messages):
        if message.call:
            texts = (f"{message.call.name}\n", _python(message.call))
        elif message.tools:
            tools = json.dumps(list(message.tools), ensure_ascii=False, indent=4)
            texts = ("\n", f"{message.content or _TOOLS}\n{tools}")
        else:
            texts = ("\n", message.content)
        blocks.append(RoleBlock(message.role, texts, turn, message.call is not None, message.learnt))
    return join(CHATGLM3, blocks, generation_prompt)


def _python(call: ToolCall) -> str:
    """Arguments given as JSON become Python; a block for the interpreter stays as it is."""
    try:
        arguments = strict_json.parse(call.arguments)
    except json.JSONDecodeError:
        return call.arguments
    if not isinstance(arguments, dict):
        return call.arguments
    written = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f"```python\ntool_call({written})\n```"


CHATGLM2 = Template(
    name="chatglm2",
    prefix=("[gMASK]", "sop"),
    stops=("</s>",),
    stop="</s>",
    end_of_text="</s>",
    write=_write_rounds,
)
CHATGLM3 = Template(
    name="chatglm3",
    prefix=("[gMASK]", "sop"),
    stops=("</s>", "<|user|>", "<|observation|>"),
    stop="</s>",
    end_of_text="</s>",
    write=_write_roles,
)
