"""Every key of a config with what it means, what it takes and its default: read from the schema, written as
commented YAML (the verb `config`) and as the tables of docs/config.md, in English or Chinese.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

from glm_accelerate.config.load import json_schema
from glm_accelerate.config.strict_yaml import read_document, read_value
from glm_accelerate.runtime.errors import UserError

Language = Literal["en", "zh"]
WORDS = {  # of tables, and of kinds of values
    "en": {
        "columns": "key | values | default | what it is",
        "due": "required",
        "integer": "whole number",
        "number": "number",
        "string": "text",
        "array": "list of",
    },
    "zh": {
        "columns": "键 | 取值 | 默认 | 含义",
        "due": "必填",
        "integer": "整数",
        "number": "数",
        "string": "文本",
        "array": "列表，元素为",
    },
}
LIMITS = {"minimum": ">= ", "exclusiveMinimum": "> ", "maximum": "<= ", "exclusiveMaximum": "< "}
MOST = 10**18  # a limit beyond this is of the format, not of the matter


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a section."""

    name: str
    about: str
    values: str  # what it takes, in words
    required: bool
    default: Any


@dataclass(frozen=True, slots=True)
class SectionKeys:
    """A section and its keys."""

    name: str
    about: str
    keys: tuple[Key, ...]


def sections(language: Language = "en") -> list[SectionKeys]:
    """All of a config, in its order."""
    schema = json_schema()
    words = _chinese() if language == "zh" else {}
    found: list[SectionKeys] = []
    for name, reference in schema["properties"].items():
        section = schema["$defs"][reference["$ref"].rpartition("/")[2]]
        said = words.get(name, {})
        due = section.get("required", ())
        keys = tuple(
            Key(
                key,
                said.get(key) or " ".join(value["description"].split()),
                " | ".join(_values(value, language, schema)),
                key in due,
                value.get("default"),
            )
            for key, value in section["properties"].items()
        )
        about = said.get("about") or reference.get("description") or section["description"]
        found.append(SectionKeys(name, about, keys))
    return found


def as_yaml(section: SectionKeys, given: Mapping[str, Any] | None = None, language: Language = "en") -> str:
    """A section to copy. `given`: the values of a config; keys that keep their default are then comments."""
    lines = [f"{section.name}:  # {section.about}"]
    for key in section.keys:
        value = key.default if given is None else given.get(key.name, key.default)
        kept = given is not None and not key.required and value == key.default
        shown = "" if key.required and given is None else f" {_plain(value)}"
        due = f"; {WORDS[language]['due']}" if key.required else ""
        lines.append(f"  # {key.about} [{key.values}{due}]")
        lines.append(f"  {'# ' if kept else ''}{key.name}:{shown}")
    return "\n".join(lines) + "\n"


def as_tables(language: Language = "en") -> str:
    """All sections, as docs/config.md and docs/zh/config.md have them."""
    return "\n".join(_table(section, language) for section in sections(language))


def _table(section: SectionKeys, language: Language) -> str:
    due = WORDS[language]["due"]
    rows = [
        (f"`{key.name}`", key.values, due if key.required else f"`{_plain(key.default)}`", key.about)
        for key in section.keys
    ]
    cells = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    lines = [
        f"| {WORDS[language]['columns']} |",
        "| --- | --- | --- | --- |",
        *(f"| {row} |" for row in cells),
    ]
    return f"## {section.name}\n\n{section.about}\n\n" + "\n".join(lines) + "\n"


def _values(kind: Mapping[str, Any], language: Language, schema: Mapping[str, Any]) -> Iterator[str]:
    """What a key takes, each kind by itself."""
    words = WORDS[language]
    if "anyOf" in kind:
        for each in kind["anyOf"]:
            yield from _values(each, language, schema)
    elif "$ref" in kind:
        inside = schema["$defs"][kind["$ref"].rpartition("/")[2]]["properties"]
        yield "{" + ", ".join(inside) + "}"
    elif "const" in kind or "enum" in kind:
        yield from map(_plain, kind.get("enum", [kind.get("const")]))
    elif kind["type"] == "array":
        each = kind.get("items") or kind["prefixItems"][0]
        yield f"{words['array']} " + ", ".join(_values(each, language, schema))
    elif kind["type"] in ("integer", "number"):
        limits = [
            sign + _plain(kind[name]) for name, sign in LIMITS.items() if abs(kind.get(name, MOST)) < MOST
        ]
        yield " ".join((words[kind["type"]], ", ".join(limits))).strip()
    else:
        yield {"boolean": "true | false", "null": "null"}.get(kind["type"]) or words["string"]


def _plain(value: Any) -> str:
    """As one writes it in YAML."""
    if isinstance(value, float) and value.is_integer() and abs(value) < MOST:
        value = int(value)
    quoted = json.dumps(value, ensure_ascii=False)
    return value if isinstance(value, str) and _reads_as(value) else quoted


def _reads_as(text: str) -> bool:
    """Whether YAML takes it for the same text without quotes."""
    try:
        return read_value(text, "") == text
    except UserError:
        return False


def _chinese() -> dict[str, dict[str, str]]:
    text = (resources.files("glm_accelerate.config") / "keys.zh.yaml").read_text(encoding="utf-8")
    return read_document(text, "keys.zh.yaml").values
