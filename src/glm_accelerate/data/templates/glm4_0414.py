"""GLM-4-0414 (9B, 32B): tools first, then all system messages, then the other turns in their order.

Each is `<|role|>\\n{content}`; a call is `<|assistant|>{tool name} \\n{arguments}`, with a space that the
model's own template has as well.
"""

from collections.abc import Sequence
from dataclasses import replace

from glm_accelerate.data.templates.glm4 import GLM4, describe
from glm_accelerate.data.templates.template import RoleBlock, join
from glm_accelerate.data.types import Message, TextPiece


def only_carries_tools(message: Message) -> bool:
    """Whether a system message is there for its tools alone, so that it has no turn of its own."""
    return message.role == "system" and bool(message.tools) and not message.content


def _write(messages: Sequence[Message], generation_prompt: bool) -> list[TextPiece]:
    tools = [tool for message in messages for tool in message.tools]
    turns = [(turn, message) for turn, message in enumerate(messages) if not only_carries_tools(message)]
    blocks: list[RoleBlock] = []
    if tools:
        carrier = next(turn for turn, message in enumerate(messages) if message.tools)
        text = "\n# 可用工具\n\n" + "\n".join(map(describe, tools))
        blocks.append(RoleBlock("system", (text,), carrier))
    blocks += [_block(turn, message) for turn, message in turns if message.role == "system"]
    blocks += [_block(turn, message) for turn, message in turns if message.role != "system"]
    return join(GLM4_0414, blocks, generation_prompt)


def _block(turn: int, message: Message) -> RoleBlock:
    if message.call:
        text = f"{message.call.name} \n{message.call.arguments}"
        return RoleBlock("assistant", (text,), turn, calls=True, learnt=message.learnt)
    return RoleBlock(message.role, (f"\n{message.content}",), turn, learnt=message.learnt)


GLM4_0414 = replace(GLM4, name="glm4-0414", write=_write, version=2)
