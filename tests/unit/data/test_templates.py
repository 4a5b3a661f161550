"""The text of each template, and which of its pieces are targets."""

import json
from pathlib import Path

import pytest

from glm_accelerate.data.templates import detect_template, get_template
from glm_accelerate.data.types import Message, TextPiece, ToolCall
from glm_accelerate.runtime.errors import UserError

TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "天气", "parameters": {"type": "object"}},
}
SHOWN = json.dumps(TOOL["function"], ensure_ascii=False, indent=4)
CHATGLM = {"model_type": "chatglm", "padded_vocab_size": 65024}
CALL = ToolCall("get_weather", '{"city": "Paris"}')
AGENT = [
    Message("system", "", (TOOL,)),
    Message("user", "q"),
    Message("assistant", "let me see"),
    Message("assistant", "", call=CALL),
    Message("observation", "22"),
    Message("assistant", "warm"),
]


def text_of(pieces: list[TextPiece]) -> str:
    return "".join(piece.text for piece in pieces)


def learnt(pieces: list[TextPiece]) -> list[str]:
    return [piece.text for piece in pieces if piece.target]


def test_glm4_writes_tools_calls_and_results() -> None:
    pieces = get_template("glm4").render(AGENT)
    who = (
        "你是一个名为 ChatGLM 的人工智能助手。你是基于智谱AI训练的语言模型 GLM-4 模型开发的，"
        "你的任务是针对用户的问题和要求提供适当的答复和支持。"
    )
    assert text_of(pieces) == (
        f"[gMASK]<sop><|system|>\n{who}\n\n# 可用工具\n## get_weather\n\n{SHOWN}\n"
        "在调用上述函数时，请使用 Json 格式表示调用的参数。<|user|>\nq<|assistant|>\nlet me see"
        '<|assistant|>get_weather\n{"city": "Paris"}<|observation|>\n22<|assistant|>\nwarm<|user|>'
    )
    assert learnt(pieces) == [
        "\nlet me see",
        "<|assistant|>",
        'get_weather\n{"city": "Paris"}',
        "<|observation|>",
        "\nwarm",
        "<|user|>",
    ]


def test_glm4_leaves_out_turns_without_text() -> None:
    messages = [Message("system", "s"), Message("user", ""), Message("user", "q"), Message("assistant", "")]
    assert text_of(get_template("glm4").render(messages)) == "[gMASK]<sop><|system|>\ns<|user|>\nq"


def test_0414_puts_tools_and_system_messages_first() -> None:
    messages = [
        Message("user", "q"),
        Message("assistant", "a"),
        Message("system", "s", (TOOL, TOOL)),
        Message("user", "r"),
    ]
    told = f"## get_weather\n\n{SHOWN}\n在调用上述函数时，请使用 Json 格式表示调用的参数。"
    assert text_of(get_template("glm4-0414").render(messages, generation_prompt=True)) == (
        f"[gMASK]<sop><|system|>\n# 可用工具\n\n{told}\n{told}<|system|>\ns<|user|>\nq<|assistant|>\na"
        "<|user|>\nr<|assistant|>"
    )
    pieces = get_template("glm4-0414").render(AGENT[:4])
    assert text_of(pieces).endswith('let me see<|assistant|>get_weather \n{"city": "Paris"}<|observation|>')
    assert pieces[-1].target  # a call at the end stops before what the tool will say


def test_chatglm3_cuts_pieces_where_the_original_does() -> None:
    pieces = get_template("chatglm3").render(AGENT)
    texts = [piece.text for piece in pieces]
    tools = json.dumps([TOOL], ensure_ascii=False, indent=4)
    opened = "Answer the following questions as best as you can. You have access to the following tools:"
    assert texts[:5] == ["[gMASK]", "sop", "<|system|>", "\n", f"{opened}\n{tools}"]
    assert texts[5:8] == ["<|user|>", "\n", "q"]
    called = ["get_weather\n", "```python\ntool_call(city='Paris')\n```"]
    answer = ["<|assistant|>", "\n", "let me see", "<|assistant|>", *called]
    assert texts[8:] == [*answer, "<|observation|>", "\n", "22", "<|assistant|>", "\n", "warm", "</s>"]
    assert learnt(pieces) == [
        "\n",
        "let me see",
        "<|assistant|>",
        *called,
        "<|observation|>",
        "\n",
        "warm",
        "</s>",
    ]


def test_chatglm3_leaves_code_for_the_interpreter_alone() -> None:
    call = ToolCall("interpreter", "```python\n1 + 1\n```")
    pieces = get_template("chatglm3").render([Message("user", "q"), Message("assistant", "", call=call)])
    assert [piece.text for piece in pieces][-3:] == ["interpreter\n", call.arguments, "<|observation|>"]


def test_chatglm2_counts_rounds_from_one() -> None:
    messages = [
        Message("user", "q"),
        Message("assistant", "a"),
        Message("user", "r"),
        Message("assistant", "b"),
    ]
    pieces = get_template("chatglm2").render(messages)
    prompt = "[Round 1]\n\n问：q\n\n答：a\n\n[Round 2]\n\n问：r\n\n答："
    assert [piece.text for piece in pieces] == ["[gMASK]", "sop", prompt, "b", "</s>"]
    assert learnt(pieces) == ["b", "</s>"]
    assert get_template("chatglm2").render(messages[:3], generation_prompt=True) == [
        *pieces[:2],
        TextPiece(prompt, turn=2),
    ]


@pytest.mark.parametrize(
    "messages", [AGENT, [Message("assistant", "a")], [Message("user", "q")] * 2, [Message("system", "s")]]
)
def test_chatglm2_refuses_what_it_cannot_write(messages: list[Message]) -> None:
    with pytest.raises(UserError, match=r"ChatGLM2|question|expected"):
        get_template("chatglm2").render(messages)


def test_a_role_that_cannot_end_an_answer_is_not_learnt() -> None:
    messages = [Message("user", "q"), Message("assistant", "a"), Message("system", "s"), Message("user", "r")]
    assert learnt(get_template("glm4").render(messages)) == ["\na"]


def test_only_functions_are_tools() -> None:
    with pytest.raises(UserError, match="a tool of type 'python'"):
        get_template("glm4").render([Message("system", "", ({"type": "python"},))])


def test_unknown_name() -> None:
    with pytest.raises(UserError, match=r"no template is called 'qwen'.*glm4-0414"):
        get_template("qwen")


def write(
    directory: Path, config: dict[str, object], tokenizer: dict[str, object] | None = None, code: str = ""
) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    if code:
        (directory / "tokenization_chatglm.py").write_text(code)
    return directory


@pytest.mark.parametrize(
    ("config", "tokenizer", "code", "wanted"),
    [
        ({"model_type": "glm4"}, None, "", "glm4-0414"),
        ({"model_type": "glm"}, {"chat_template": "x"}, "", "glm4"),
        (CHATGLM | {"padded_vocab_size": 151552}, None, "", "glm4"),
        (CHATGLM, None, 'x = ["eop", "<|observation|>"]', "chatglm3"),
        (CHATGLM, None, 'x = ["sop", "eop"]', "chatglm2"),
        (CHATGLM, {"chat_template": "<|user|>"}, "", "chatglm3"),
        (CHATGLM | {"_name_or_path": "THUDM/chatglm2-6b"}, None, "", "chatglm2"),
    ],
)  # fmt: skip
def test_detect(
    tmp_path: Path, config: dict[str, object], tokenizer: dict[str, object] | None, code: str, wanted: str
) -> None:
    assert detect_template(write(tmp_path, config, tokenizer, code)) == wanted


@pytest.mark.parametrize(
    ("config", "tokenizer", "said"),
    [
        ({"model_type": "glm4"}, {"chat_template": "<think>"}, "thinks before it answers"),
        ({"model_type": "llama"}, None, "no template is known for model_type 'llama'"),
        ({"model_type": "chatglm"}, None, "whether this is ChatGLM2 or ChatGLM3"),
    ],
)
def test_detect_names_the_choices(
    tmp_path: Path, config: dict[str, object], tokenizer: dict[str, object] | None, said: str
) -> None:
    with pytest.raises(
        UserError, match=f"{said}.*set data.template to chatglm2, chatglm3, glm4 or glm4-0414"
    ):
        detect_template(write(tmp_path / "model", config, tokenizer))


def test_detect_without_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json"):
        detect_template(tmp_path)
