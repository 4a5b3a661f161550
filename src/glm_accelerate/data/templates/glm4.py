"""GLM-4-9B (chat, 1M and -hf) and GLM-4-0414 (9B, 32B)."""

import json
from collections.abc import Sequence
from dataclasses import replace

from glm_accelerate.data.templates.template import RoleBlock, Template, function_of, join
from glm_accelerate.data.types import Message, TextPiece, Tool

_WHO = (
    "你是一个名为 ChatGLM 的人工智能助手。你是基于智谱AI训练的语言模型 GLM-4 模型开发的，"
    "你的任务是针对用户的问题和要求提供适当的答复和支持。"
)
_HOW_TO_CALL = "在调用上述函数时，请使用 Json 格式表示调用的参数。"


def _describe(tool: Tool) -> str:
    function = function_of(tool)
    written = json.dumps(function, ensure_ascii=False, indent=4)
    return f"## {function['name']}\n\n{written}\n{_HOW_TO_CALL}"


def _write(messages: Sequence[Message], generation_prompt: bool) -> list[TextPiece]:
    """`[gMASK]<sop>`, then `<|role|>{tool name}\\n{content}` for each message.

    A turn with empty text is left out, as the model's own template does. Tools open with a Chinese sentence
    about who the model is, in a system turn before the system message that carries them.
    """
    blocks: list[RoleBlock] = []
    for turn, message in enumerate(messages):
        if message.tools:
            text = "\n".join([f"\n{_WHO}\n\n# 可用工具", *map(_describe, message.tools)])
            blocks.append(RoleBlock("system", (text,), turn))
        name, content = ("", message.content)
        if message.call:
            name, content = message.call.name, message.call.arguments
        if content:
            texts = (f"{name}\n{content}",)
            blocks.append(RoleBlock(message.role, texts, turn, message.call is not None, message.learnt))
    return join(GLM4, blocks, generation_prompt)


def _write_0414(messages: Sequence[Message], generation_prompt: bool) -> list[TextPiece]:
    """Tools first, then all system messages, then the other turns in their order.

    Each is `<|role|>\\n{content}`; a call is `<|assistant|>{tool name} \\n{arguments}`, with a space that the
    model's own template has as well.
    """
    tools = [tool for message in messages for tool in message.tools]
    turns = [(turn, message) for turn, message in enumerate(messages) if not only_carries_tools(message)]
    blocks: list[RoleBlock] = []
    if tools:
        carrier = next(turn for turn, message in enumerate(messages) if message.tools)
        text = "\n# 可用工具\n\n" + "\n".join(map(_describe, tools))
        blocks.append(RoleBlock("system", (text,), carrier))
    for turn, message in sorted(turns, key=lambda pair: pair[1].role != "system"):  # else in their order
        call = message.call
        text = f"{call.name} \n{call.arguments}" if call else f"\n{message.content}"
        blocks.append(RoleBlock(message.role, (text,), turn, call is not None, message.learnt))
    return join(GLM4_0414, blocks, generation_prompt)


def only_carries_tools(message: Message) -> bool:
    """Whether 0414 writes no turn for a system message, because it is there for its tools alone."""
    return message.role == "system" and bool(message.tools) and not message.content


GLM4 = Template(
    name="glm4",
    prefix=("[gMASK]", "<sop>"),
    stops=("<|endoftext|>", "<|user|>", "<|observation|>"),
    stop="<|user|>",
    end_of_text="<|endoftext|>",
    write=_write,
    version=3,
)
GLM4_0414 = replace(GLM4, name="glm4-0414", write=_write_0414, version=2)
