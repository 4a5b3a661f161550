"""GLM-4-9B (chat, 1M and -hf): `[gMASK]<sop>`, then `<|role|>{tool name}\\n{content}` for each message.

A turn with empty text is left out, as the model's own template does. Tools open with a Chinese sentence
about who the model is, in a system turn before the system message that carries them.
"""

import json
from collections.abc import Sequence

from glm_accelerate.data.templates.template import RoleBlock, Template, function_of, join
from glm_accelerate.data.types import Message, TextPiece, Tool

_WHO = (
    "你是一个名为 ChatGLM 的人工智能助手。你是基于智谱AI训练的语言模型 GLM-4 模型开发的，"
    "你的任务是针对用户的问题和要求提供适当的答复和支持。"
)
HOW_TO_CALL = "在调用上述函数时，请使用 Json 格式表示调用的参数。"


def describe(tool: Tool) -> str:
    """A tool as both GLM-4 and 0414 show it to the model."""
    function = function_of(tool)
    written = json.dumps(function, ensure_ascii=False, indent=4)
    return f"## {function['name']}\n\n{written}\n{HOW_TO_CALL}"


def _write(messages: Sequence[Message], generation_prompt: bool) -> list[TextPiece]:
    blocks: list[RoleBlock] = []
    for turn, message in enumerate(messages):
        if message.tools:
            text = "\n".join([f"\n{_WHO}\n\n# 可用工具", *map(describe, message.tools)])
            blocks.append(RoleBlock("system", (text,), turn))
        content = message.call.arguments if message.call else message.content
        if content:
            called = message.call is not None
            text = f"{message.call.name if message.call else ''}\n{content}"
            blocks.append(RoleBlock(message.role, (text,), turn, calls=called, learnt=message.learnt))
    return join(GLM4, blocks, generation_prompt)


GLM4 = Template(
    name="glm4",
    prefix=("[gMASK]", "<sop>"),
    stops=("<|endoftext|>", "<|user|>", "<|observation|>"),
    stop="<|user|>",
    end_of_text="<|endoftext|>",
    write=_write,
    version=3,
)
