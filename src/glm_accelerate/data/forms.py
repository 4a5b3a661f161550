"""The forms in which people write conversations, each turned into messages.

messages: [{role, content, tools?, tool_calls?, metadata?}], tools?    conversations: as ChatGLM3 documents it
conversations: [{from, value}], tools?, system?  (sharegpt)            text: "..."
instruction, input?, output | prompt, response | content, summary, each with history?, system?  (alpaca)
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from reprlib import repr as shortly
from typing import Any, Literal, cast, get_args

from glm_accelerate.data import strict_json
from glm_accelerate.data.types import Conversation, FilePlace, Message, Role, Tool, ToolCall
from glm_accelerate.runtime.errors import UserError

FormatName = Literal["messages", "conversations", "alpaca", "sharegpt", "text"]
Line = Mapping[str, Any]
Names = Sequence[tuple[str, str]]  # ours and theirs

_ALPACA = (("instruction", "output"), ("prompt", "response"), ("content", "summary"))
_STRUCTURED = ("messages", "conversations", "history", "tools")  # columns that hold JSON as text
_MASKS = ("loss", "weight", "train", "loss_mask")  # keys that exclude an answer from training
_SPEAKERS: Mapping[str, str] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "observation": "observation",
    "tool": "observation",
    "function_response": "observation",
}


def format_of(line: Line, place: FilePlace) -> FormatName:
    """The form of a line, by its keys."""
    if "messages" in line:
        return "messages"
    if "conversations" in line:
        turns = line["conversations"]
        first = turns[0] if isinstance(turns, list) and turns else {}
        return "sharegpt" if isinstance(first, dict) and "from" in first else "conversations"
    if any(question in line and answer in line for question, answer in _ALPACA):
        return "alpaca"
    if "text" in line:
        return "text"
    raise UserError(
        f"cannot tell the form of a line with the keys {', '.join(map(shortly, line)) or '(none)'}",
        where=place,
        cure="each line has messages, conversations, instruction and output, prompt and response, or text",
    )


def renamed(line: Line, columns: Names, tags: Names) -> Line:
    """A line by our names. Columns that hold turns may be JSON as text, as in tables."""
    if columns:
        line = with_turns({ours: line[theirs] for ours, theirs in columns if theirs in line})
    turns = line.get("conversations")
    if not tags or not isinstance(turns, list):
        return line
    keys = {theirs: ours for ours, theirs in tags if ours in ("from", "value")}
    speakers = {theirs: ours for ours, theirs in tags if ours not in ("from", "value")}

    def turn(theirs: object) -> object:
        if not isinstance(theirs, dict):
            return theirs
        ours = {keys.get(key, key): value for key, value in theirs.items()}
        speaker = ours.get("from")
        return ours | {"from": speakers.get(speaker, speaker)} if isinstance(speaker, str) else ours

    return {**line, "conversations": [turn(each) for each in turns]}


def with_turns(row: dict[str, Any]) -> dict[str, Any]:
    """Lists of turns that are JSON as text become lists."""
    for key in _STRUCTURED:
        if isinstance(value := row.get(key), str):
            with suppress(json.JSONDecodeError, UserError):  # its form says what is expected there
                row[key] = strict_json.parse(value)
    return row


def conversation(line: Line, format: FormatName, place: FilePlace) -> Conversation:
    """UserError with the line's place if it does not have that form."""
    try:
        if format == "text":
            return Conversation((), place, _text(line, "text"))
        write = {
            "messages": _messages,
            "conversations": _chatglm3,
            "alpaca": _alpaca,
            "sharegpt": _sharegpt,
        }[format]
        if line.get("functions"):
            cure = 'write "tools": [...] with the same objects'
            raise UserError("functions is OpenAI's old form", cure=cure)
        return Conversation(tuple(_with_tools(write(line), _tools(line))), place)
    except UserError as error:
        raise UserError(error.what, where=place, cure=error.cure) from error
    except RecursionError as error:  # json.dumps may need more of the stack than json.loads
        raise UserError("JSON nested too deeply", where=place, cure="remove the line") from error


def _messages(line: Line) -> list[Message]:
    messages: list[Message] = []
    for at, turn in enumerate(_turns(line, "messages")):
        name = f"messages[{at}]"
        role = turn.get("role")
        if role in ("tool", "function"):
            role = "observation"
        role = _role(role, name)
        learnt = role != "assistant" or _learnt(turn, name)
        _refuse_calls(turn, name, "function_call")
        calls = [_call(call, name) for call in _list(turn, "tool_calls", name)] if role == "assistant" else []
        content = _content(turn, name, optional=bool(calls or turn.get("tools")), data=role == "observation")
        metadata = turn.get("metadata")
        if role == "assistant" and isinstance(metadata, str) and metadata.strip():
            if calls:
                raise UserError(f"{name} has metadata and tool_calls", cure="say the call in one of them")
            call = ToolCall(metadata.strip(), content)
            messages.append(Message("assistant", "", call=call, learnt=learnt))
            continue
        if content or not calls:
            tools = _tools(turn) if role == "system" else ()
            messages.append(Message(role, content, tools, learnt=learnt))
        messages += [Message("assistant", "", call=call, learnt=learnt) for call in calls]
    return messages


def _chatglm3(line: Line) -> list[Message]:
    messages: list[Message] = []
    for at, turn in enumerate(_turns(line, "conversations")):
        name = f"conversations[{at}]"
        _refuse_calls(turn, name, "function_call", "tool_calls")
        learnt = turn.get("role") not in ("assistant", "tool") or _learnt(turn, name)
        if turn.get("role") != "tool":
            messages.append(Message(_role(turn.get("role"), name), _content(turn, name), learnt=learnt))
            continue
        arguments = turn.get("parameters")
        written = arguments if isinstance(arguments, str) else _json(arguments or {})
        call = ToolCall(_text(turn, "name", name), written)
        messages.append(Message("assistant", "", call=call, learnt=learnt))
        observation = turn.get("observation")
        messages.append(
            Message("observation", observation if isinstance(observation, str) else _json(observation))
        )
    return messages


def _alpaca(line: Line) -> list[Message]:
    whole = [pair for pair in _ALPACA if all(key in line for key in pair)]
    pair = next((pair for pair in (*whole, *_ALPACA) if pair[0] in line), _ALPACA[0])
    if pair[0] != "instruction" and line.get("instruction"):
        raise UserError(f"instruction stands beside {pair[0]}", cure='name it "system", or join the two')
    messages: list[Message] = []
    if line.get("system"):
        messages.append(Message("system", _text(line, "system")))
    for at, past in enumerate(_list(line, "history", "")):
        if not (isinstance(past, list) and len(past) == 2 and all(isinstance(text, str) for text in past)):
            raise UserError(f"history[{at}] is not [question, answer]", cure="write two strings")
        messages += [Message("user", past[0]), Message("assistant", past[1])]
    question = _text(line, pair[0])
    if line.get("input"):
        question = "\n".join(filter(None, [question, _text(line, "input")]))
    return [*messages, Message("user", question), Message("assistant", _text(line, pair[1]))]


def _sharegpt(line: Line) -> list[Message]:
    messages: list[Message] = []
    if line.get("system"):
        messages.append(Message("system", _text(line, "system")))
    for at, turn in enumerate(_turns(line, "conversations")):
        name = f"conversations[{at}]"
        speaker, value = turn.get("from"), _text(turn, "value", name)
        _refuse_calls(turn, name, "function_call", "tool_calls")
        if speaker == "function_call":
            call = _call(_parsed(value, f"{name}.value"), name)
            messages.append(Message("assistant", "", call=call, learnt=_learnt(turn, name)))
            continue
        if not isinstance(speaker, str) or speaker not in _SPEAKERS:
            known = ", ".join((*_SPEAKERS, "function_call"))
            raise UserError(f"{name}.from is {shortly(speaker)}", cure=f"one of {known}")
        role = cast(Role, _SPEAKERS[speaker])
        messages.append(Message(role, value, learnt=role != "assistant" or _learnt(turn, name)))
    return messages


def _learnt(turn: Line, name: str) -> bool:
    """Whether no mask excludes the answer. A mask that says neither yes nor no is an error."""
    masks = {key: turn[key] for key in _MASKS if turn.get(key) is not None}
    for key, mask in masks.items():
        if mask not in (0, 1):
            cure = "0 or false excludes the answer, 1 or true not"
            raise UserError(f"{name}.{key} is {shortly(mask)}", cure=cure)
    return all(masks.values())


def _refuse_calls(turn: Line, name: str, *keys: str) -> None:
    """A call under a key that this form does not have would be lost."""
    for key in keys:
        if turn.get(key):
            cure = 'in the form messages: "tool_calls": [{"function": {"name": ..., "arguments": ...}}]'
            raise UserError(f"{name} has {key}", cure=cure)


def _with_tools(messages: list[Message], tools: tuple[Tool, ...]) -> list[Message]:
    """Tools beside the conversation move to its system message, which is added where there is none."""
    if not tools:
        return messages
    if messages and messages[0].role == "system":
        first = messages[0]
        return [Message("system", first.content, first.tools or tools), *messages[1:]]
    return [Message("system", "", tools), *messages]


def _tools(holder: Line) -> tuple[Tool, ...]:
    tools = holder.get("tools")
    tools = _parsed(tools, "tools") if isinstance(tools, str) and tools else tools
    if not tools:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError("tools is not a list of objects", cure="write [{...}, ...]")
    return tuple(_without_holes(tool) for tool in cast(list[Tool], tools))


def _without_holes(tool: Tool) -> Tool:
    """Arrow gives every tool the properties of all others as null: the author never wrote those."""
    function = tool.get("function", tool)
    parameters = function.get("parameters") if isinstance(function, dict) else None
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    if not isinstance(properties, dict) or None not in properties.values():
        return tool
    filled = {name: value for name, value in properties.items() if value is not None}
    mended = {**function, "parameters": {**cast(Tool, parameters), "properties": filled}}
    return {**tool, "function": mended} if "function" in tool else mended


def _call(call: object, name: str) -> ToolCall:
    """OpenAI's {"function": {"name", "arguments"}}, or the inner object alone."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(f"a call in {name} has no name", cure='{"name": ..., "arguments": {...}}')
    arguments = function.get("arguments", {})
    return ToolCall(function["name"], arguments if isinstance(arguments, str) else _json(arguments))


def _turns(line: Line, key: str) -> Sequence[Line]:
    turns = line.get(key)
    if turns is None:
        raise UserError(f"the field {key!r} is missing", cure=f'{{"{key}": [...]}} is expected')
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise UserError(f"{key} is not a list of objects", cure=f'{{"{key}": [{{...}}, ...]}} is expected')
    if not turns:
        raise UserError(f"{key} is empty", cure="remove the line")
    return cast(Sequence[Line], turns)


def _role(role: object, name: str) -> Role:
    if role is None:
        raise UserError(f"{name} has no role", cure=f"one of {', '.join(get_args(Role))}")
    if role not in get_args(Role):
        raise UserError(f"{name}.role is {shortly(role)}", cure=f"one of {', '.join(get_args(Role))}, tool")
    return cast(Role, role)


def _content(turn: Line, name: str, *, optional: bool = False, data: bool = False) -> str:
    """A string, or OpenAI's list of text parts; what a tool gave back (`data`) may be any JSON."""
    content = turn.get("content")
    if content is None and optional:
        return ""
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in content
    ):
        return "".join(_text(part, "text", name) for part in cast(list[Line], content))
    if data and content is not None and not isinstance(content, str):
        return _json(content)
    return _text(turn, "content", name)


def _text(holder: Line, key: str, name: str = "") -> str:
    value = holder.get(key)
    path = f"{name}.{key}" if name else key
    if value is None:
        raise UserError(f"the field {path!r} is missing", cure="write it, or remove the line")
    if not isinstance(value, str):
        raise UserError(f"{path} is {type(value).__name__}, not a string", cure="write it in quotes")
    return value


def _list(holder: Line, key: str, name: str) -> list[Any]:
    value = holder.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        path = f"{name}.{key}" if name else key
        raise UserError(f"{path} is {type(value).__name__}, not a list", cure="write [...]")
    return cast(list[Any], value)


def _parsed(text: str, name: str) -> object:
    try:
        return strict_json.parse(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{name} is a string that is not JSON: {error}", cure="write the value itself"
        ) from error
    except UserError as error:
        raise UserError(f"{name}: {error.what}", cure=error.cure) from error


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
