"""Tools, calls and histories in each form become the same messages."""

from typing import Any

import pytest

from glm_accelerate.data.forms import FormatName, conversation
from glm_accelerate.data.types import FilePlace, Message, ToolCall
from glm_accelerate.runtime.errors import UserError

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {}}}}}
CALL = ToolCall("f", '{"x": "Paris"}')
OLD = {"name": "f", "arguments": "{}"}
AGENT = (
    Message("system", "", (TOOL,)),
    Message("user", "q"),
    Message("assistant", "let me see"),
    Message("assistant", "", call=CALL),
    Message("observation", '{"t": 22}'),
    Message("assistant", "warm"),
)


def messages(line: dict[str, Any], format: FormatName) -> tuple[Message, ...]:
    return conversation(line, format, FilePlace("f", 1)).messages


def test_openai_tool_calls() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": "Paris"}}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {"role": "assistant", "content": "let me see", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": {"t": 22}},
        {"role": "assistant", "content": "warm", "tool_calls": None},
    ]
    assert messages({"messages": turns, "tools": [TOOL]}, "messages") == AGENT
    silent = {"role": "assistant", "content": None, "tool_calls": [call, call]}
    assert messages({"messages": [turns[0], silent]}, "messages")[1:] == (AGENT[3], AGENT[3])


def test_glm4_metadata() -> None:
    turns = [
        {"role": "system", "content": "", "tools": [TOOL]},
        {"role": "user", "content": "q", "tools": None},
        {"role": "assistant", "content": "let me see", "metadata": ""},
        {"role": "assistant", "metadata": "f\n", "content": CALL.arguments},
        {"role": "observation", "content": '{"t": 22}'},
        {"role": "assistant", "content": "warm"},
    ]
    assert messages({"messages": turns}, "messages") == AGENT


def test_chatglm3_tool_turns() -> None:
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "let me see"},
        {"role": "tool", "name": "f", "parameters": {"x": "Paris"}, "observation": {"t": 22}},
        {"role": "assistant", "content": "warm"},
    ]
    assert messages({"conversations": turns, "tools": [TOOL]}, "conversations") == AGENT


def test_sharegpt_function_calls() -> None:
    turns = [
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": "let me see"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": "Paris"}}'},
        {"from": "observation", "value": '{"t": 22}'},
        {"from": "gpt", "value": "warm"},
    ]
    written = '[{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {}}}}}]'
    assert messages({"conversations": turns, "tools": written}, "sharegpt") == AGENT


@pytest.mark.parametrize("mask", [{"weight": 0}, {"loss": False}, {"train": False}, {"loss_mask": 0}])
@pytest.mark.parametrize("form", ["messages", "conversations", "sharegpt"])
def test_an_excluded_answer_is_marked(form: FormatName, mask: dict[str, Any]) -> None:
    key = "messages" if form == "messages" else "conversations"
    speaker, text = ("from", "value") if form == "sharegpt" else ("role", "content")
    kept = {next(iter(mask)): 1, "loss": True, "weight": None, "other": 0}
    turns = [
        {speaker: "user", text: "q", **mask},
        {speaker: "assistant", text: "a", **mask},
        {speaker: "assistant", text: "b", **kept},
    ]
    assert [message.learnt for message in messages({key: turns}, form)] == [True, False, True]


def test_an_excluded_call_is_marked() -> None:
    both = {"role": "assistant", "content": "a", "tool_calls": [OLD, OLD], "loss": 0}
    assert [message.learnt for message in messages({"messages": [both]}, "messages")] == [False] * 3
    glm4 = {"role": "assistant", "content": "{}", "metadata": "f", "weight": 0}
    assert [message.learnt for message in messages({"messages": [glm4]}, "messages")] == [False]
    tool = {"role": "tool", "name": "f", "observation": "22", "loss": False}
    assert [message.learnt for message in messages(said(tool), "conversations")] == [False, True]
    call = {"from": "function_call", "value": '{"name": "f"}', "loss": False}
    assert [message.learnt for message in messages(said(call), "sharegpt")] == [False]


def test_alpaca_takes_the_pair_that_is_whole() -> None:
    line = {"instruction": "", "prompt": "q", "response": "a"}
    assert messages(line, "alpaca") == (Message("user", "q"), Message("assistant", "a"))


def test_alpaca_history_and_input() -> None:
    line = {"instruction": "i", "input": "x", "output": "o", "history": [["q", "a"]], "system": "s"}
    roles = [(message.role, message.content) for message in messages(line, "alpaca")]
    past = [("system", "s"), ("user", "q"), ("assistant", "a")]
    assert roles == [*past, ("user", "i\nx"), ("assistant", "o")]


def test_tools_join_a_system_message() -> None:
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    found = messages({"messages": turns, "tools": [TOOL]}, "messages")
    assert found == (Message("system", "s", (TOOL,)), Message("user", "q"))


def test_properties_that_arrow_made_up_are_removed() -> None:
    holed: dict[str, Any] = {"name": "f", "parameters": {"properties": {"x": {}, "of another tool": None}}}
    wrapped = {"type": "function", "function": holed}
    turns = [{"role": "user", "content": "q"}]
    [system, _] = messages({"messages": turns, "tools": [wrapped, holed, TOOL]}, "messages")
    assert system.tools == (TOOL, TOOL["function"], TOOL)
    assert holed["parameters"]["properties"]["of another tool"] is None  # what was read is left as it was


def said(turn: dict[str, Any]) -> dict[str, Any]:
    return {"conversations": [turn]}


@pytest.mark.parametrize(
    ("line", "format", "complaint"),
    [
        (said({"from": "bot", "value": "x"}), "sharegpt", r"conversations\[0\]\.from is 'bot'"),
        (said({"from": ["gpt"], "value": "x"}), "sharegpt", r"\.from is \['gpt'\]"),
        (said({"from": "function_call", "value": "x"}), "sharegpt", "a string that is not JSON"),
        (said({"from": "function_call", "value": "{}"}), "sharegpt", "has no name"),
        (said({"role": "tool"}), "conversations", r"'conversations\[0\]\.name' is missing"),
        (said({"role": "assistant", "content": "", "loss": 0.5}), "conversations", r"\[0\]\.loss is 0\.5"),
        (said({"role": "assistant", "function_call": OLD}), "conversations", "has function_call"),
        (said({"role": "assistant", "content": "", "tool_calls": [OLD]}), "conversations", "has tool_calls"),
        (said({"from": "gpt", "value": "", "tool_calls": [OLD]}), "sharegpt", "has tool_calls"),
        (said({"from": "gpt", "value": "", "train": "no"}), "sharegpt", r"\[0\]\.train is 'no'"),
        ({"messages": [{"role": "assistant", "content": "", "function_call": OLD}]}, "messages",
         r"messages\[0\] has function_call .*tool_calls"),
        ({"messages": [{"role": "assistant", "metadata": "f", "tool_calls": [OLD]}]}, "messages",
         r"messages\[0\] has metadata and tool_calls"),
        ({"messages": [{"role": "assistant", "content": "a", "loss_mask": [0, 1]}]}, "messages",
         r"messages\[0\]\.loss_mask is \[0, 1\]"),
        ({"messages": [{"role": "user", "content": "q"}], "functions": [OLD]}, "messages",
         r"functions is .*tools"),
        ({"instruction": "i", "prompt": "q", "response": "a"}, "alpaca", "instruction stands beside prompt"),
        ({"instruction": "q"}, "alpaca", "'output' is missing"),
        ({"instruction": "q", "output": 3}, "alpaca", "output is int"),
        ({"instruction": "q", "output": "a", "history": [["q"]]}, "alpaca", r"history\[0\] is not"),
        ({"instruction": "q", "output": "a", "history": "q"}, "alpaca", "history is str, not a list"),
        ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages", "tool_calls is str"),
        ({"messages": [{"role": "assistant", "tool_calls": [3]}]}, "messages", "has no name"),
        ({"messages": [{"role": "user", "content": "q"}], "tools": ["f"]}, "messages", "tools is not a list"),
        ({"text": None}, "text", "'text' is missing"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(line: dict[str, Any], format: FormatName, complaint: str) -> None:
    with pytest.raises(UserError, match=rf"^f:1: .*{complaint}"):
        conversation(line, format, FilePlace("f", 1))


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ('[{"name": "\\ud800"}]', "half of a surrogate pair"),
        ("[" * 100_000, "nested too deeply"),
        ("[" + "7" * 5000 + "]", "thousands of digits"),
        ('[{"name": "f", "x": -1e400}]', "'-1e400' is too large"),
        ("{name: f}", "a string that is not JSON"),
    ],
)
def test_json_within_a_string_is_as_strict_as_the_line(tools: str, said: str) -> None:
    with pytest.raises(UserError, match=f"f:1: tools.*{said}"):
        messages({"messages": [{"role": "user", "content": "q"}], "tools": tools}, "messages")
