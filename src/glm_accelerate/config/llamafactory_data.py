"""An entry of LLaMA-Factory's dataset_info.json -> a source of `data.train`.

If an entry names columns, those that it does not name are not read, and its own defaults do not apply.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from glm_accelerate.runtime.errors import UserError

# Their name of a column -> ours, by how the file is formatted, and what it is called if nothing is said.
ALPACA = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "history": "history",
    "system": "system",
    "tools": "tools",
}
TURNS = {"system": "system", "tools": "tools"}
COLUMNS = {
    "alpaca": ALPACA,
    "sharegpt": TURNS | {"messages": "conversations"},
    "openai": TURNS | {"messages": "messages"},
}
TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
OPENAI = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "function",
    "system_tag": "system",
}
ELSEWHERE = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
NOT_OFFERED = ("images", "videos", "audios", "chosen", "rejected", "kto_tag")
KEYS = {"file_name", "formatting", "columns", "tags", "split", "ranking", "file_sha1"}


def source_of(name: str, info: Any, path: Path, *, plain: bool) -> dict[str, Any]:
    """`plain`: it is text that is learnt whole, in the column of prompts."""
    where = f"{path}: {name}"
    entry: Any = info.get(name) if isinstance(info, dict) else None
    if not isinstance(entry, dict):
        known = ", ".join(map(str, info)) if isinstance(info, dict) else ""
        raise UserError(f"there is no data set {name}", where=path, cure=f"there are {known}")
    for key, value in cast("dict[str, Any]", entry).items():
        if key in ELSEWHERE:
            cure = "fetch it, and say file_name: where it is"
            raise UserError(f"`{key}`: data are read from files", where=where, cure=cure)
        if key not in KEYS or (key == "ranking" and value) or (key == "split" and value != "train"):
            raise UserError(f"`{key}` is {value!r}, which is not offered", where=where, cure="remove it")
    file = path.parent / str(entry.get("file_name"))
    formatting = str(entry.get("formatting", "alpaca"))
    if "file_name" not in entry or formatting not in COLUMNS:
        what = "`file_name` is missing" if formatting in COLUMNS else f"`formatting` is {formatting}"
        raise UserError(what, where=where, cure=f"formatting is one of {', '.join(COLUMNS)}")
    source: dict[str, Any] = {"path": str(file / "*" if file.is_dir() else file)}
    columns = _columns(entry, formatting, where, plain)
    if columns:
        source["columns"] = columns
    return source | _tags(entry, formatting, where)


def _columns(entry: Mapping[str, Any], formatting: str, where: str, plain: bool) -> dict[str, str]:
    """None if they are called as they are here."""
    named = cast("dict[str, str] | None", entry.get("columns"))
    if plain:
        return {"text": (named or {}).get("prompt", "instruction")}
    ours = COLUMNS[formatting]
    if named is None:
        if formatting == "alpaca":  # of their own accord they read no system, history or tools
            return {name: name for name in ("instruction", "input", "output")}
        return {ours["messages"]: "conversations"}
    for theirs in named:
        if theirs not in ours:
            cure = "there is no preference training or image here" if theirs in NOT_OFFERED else "remove it"
            raise UserError(f"the column `{theirs}` is not offered", where=where, cure=cure)
    return {ours[theirs]: name for theirs, name in named.items() if name}


def _tags(entry: Mapping[str, Any], formatting: str, where: str) -> dict[str, Any]:
    named = cast("dict[str, str]", entry.get("tags") or {})
    for theirs in named:
        if theirs not in TAGS:
            raise UserError(
                f"the tag `{theirs}` is not known", where=where, cure=f"there are {', '.join(TAGS)}"
            )
    if formatting == "openai":
        other = {theirs: name for theirs, name in named.items() if name != OPENAI[theirs]}
        if other:
            what = f"`formatting: openai` with the tags {other}"
            raise UserError(what, where=where, cure="say formatting: sharegpt, which may have any tags")
        return {}
    tags = {TAGS[theirs]: name for theirs, name in named.items() if name}
    return {"tags": tags} if tags and formatting == "sharegpt" else {}
