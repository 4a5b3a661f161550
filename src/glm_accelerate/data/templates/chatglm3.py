"""ChatGLM3: `[gMASK]sop`, then `<|role|>{tool name}\\n` and `{content}`, two pieces tokenized separately.

SentencePiece puts a space before every piece, so where the pieces are cut can be seen in the tokens. A
call is Python: the tool's name, then `tool_call(argument=value)` in a fenced block.
"""

import json
from collections.abc import Sequence

from glm_accelerate.data import strict_json
from glm_accelerate.data.templates.template import RoleBlock, Template, join
from glm_accelerate.data.types import Message, TextPiece, ToolCall

_TOOLS = "Answer the following questions as best as you can. You have access to the following tools:"


def _write(messages: Sequence[Message], generation_prompt: bool) -> list[TextPiece]:
    blocks = [_block(turn, message) for turn, message in enumerate(messages)]
    return join(CHATGLM3, blocks, generation_prompt)


def _block(turn: int, message: Message) -> RoleBlock:
    if message.call:
        texts = (f"{message.call.name}\n", _python(message.call))
        return RoleBlock("assistant", texts, turn, calls=True, learnt=message.learnt)
    content = message.content
    if message.tools:
        tools = json.dumps(list(message.tools), ensure_ascii=False, indent=4)
        content = f"{content or _TOOLS}\n{tools}"
    return RoleBlock(message.role, ("\n", content), turn, learnt=message.learnt)


def _python(call: ToolCall) -> str:
    """Arguments given as JSON become Python; a block for the interpreter is already what it has to be."""
    try:
        arguments = strict_json.parse(call.arguments)
    except json.JSONDecodeError:
        return call.arguments
    if not isinstance(arguments, dict):
        return call.arguments
    written = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f"```python\ntool_call({written})\n```"


CHATGLM3 = Template(
    name="chatglm3",
    prefix=("[gMASK]", "sop"),
    stops=("</s>", "<|user|>", "<|observation|>"),
    stop="</s>",
    end_of_text="</s>",
    write=_write,
)
