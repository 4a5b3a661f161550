"""YAML as a person means it: text -> plain values, and the line on which each was said.

Scalars follow YAML 1.2 (1e-5 is a number, `yes` and 1:30 are text, 010 is ten); keys are said once; there are
no tags, no aliases and no infinities, and size and depth are bounded. This file alone imports yaml.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import yaml

from glm_accelerate.runtime.errors import UserError

KeyPath = tuple[str | int, ...]

MOST_CHARACTERS = 1 << 18
MOST_LEVELS = 20
MOST_DIGITS = 40

TAG = "tag:yaml.org,2002:"

# What a plain scalar is (YAML 1.2, core schema), tried in this order, and how each may begin.
PLAIN = (
    (TAG + "null", r"~|null|Null|NULL|", ("~", "n", "N", "")),
    (TAG + "bool", r"true|True|TRUE|false|False|FALSE", tuple("tTfF")),
    (TAG + "int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", tuple("-+0123456789")),
    (
        TAG + "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        tuple("-+.0123456789"),
    ),
)
Resolvers = dict[str, list[tuple[str, re.Pattern[str]]]]


@dataclass(frozen=True, slots=True)
class Document:
    """What a YAML text says, and where each key stands: `lines[("optim", "clip")]` counts from 1."""

    values: dict[str, Any]
    lines: dict[KeyPath, int]
    source: str

    def place(self, path: KeyPath) -> str:
        """file:line of the key, or of the nearest one around it that the text really has."""
        for length in range(len(path), 0, -1):
            line = self.lines.get(path[:length])
            if line is not None:
                return f"{self.source}:{line}"
        return self.source


def _resolvers(known: Resolvers) -> Resolvers:
    """By the first character of a plain scalar: the tags that it may have, in order."""
    table = {first: list(entries) for first, entries in known.items()}
    for tag, pattern, beginnings in PLAIN:
        for first in beginnings:
            table.setdefault(first, []).append((tag, re.compile(rf"(?:{pattern})\Z")))
    return table


class _Loader(yaml.SafeLoader):
    """Composes nodes only: values are made below, by hand, so no constructor ever runs."""

    yaml_implicit_resolvers: Resolvers = _resolvers({})

    def __init__(self, text: str, source: str) -> None:
        super().__init__(text)
        self.source = source
        self.depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        where = f"{self.source}:{event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent):
            raise UserError("aliases (`*name`) are not allowed", where=where, cure="write the value out")
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag is not None:
            raise UserError(f"tags (`{event.tag}`) are not allowed", where=where, cure="remove it")
        if self.depth >= MOST_LEVELS:
            raise UserError(f"nested deeper than {MOST_LEVELS} levels", where=where)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes what either YAML 1.1 or our reader would take for something other than text."""

    yaml_implicit_resolvers: Resolvers = _resolvers(yaml.SafeDumper.yaml_implicit_resolvers)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def read_document(text: str, source: str) -> Document:
    """Parse one YAML mapping. An empty text says nothing, and is an empty mapping."""
    if len(text) > MOST_CHARACTERS:
        raise UserError(f"larger than {MOST_CHARACTERS >> 10} KiB", where=source, cure="is this a config?")
    node = _compose(text.removeprefix("\ufeff"), source)
    if node is None:
        return Document({}, {}, source)
    if not isinstance(node, yaml.MappingNode):
        raise UserError("`section: {key: value}` is wanted", where=f"{source}:{node.start_mark.line + 1}")
    lines: dict[KeyPath, int] = {}
    return Document(_mapping(node, (), lines, source), lines, source)


def read_value(text: str, source: str) -> Any:
    """Parse one value as it may stand behind a key."""
    try:
        node = _compose(text, source)
        return None if node is None else _value(node, (), {}, source)
    except UserError as error:  # a line number says nothing about a single value
        raise UserError(error.what, where=source, cure=error.cure) from error


def write_document(values: dict[str, Any]) -> str:
    """The text that `read_document` reads back to exactly these values."""
    return yaml.dump(values, Dumper=_Dumper, allow_unicode=True, sort_keys=False, width=100)


def _compose(text: str, source: str) -> yaml.Node | None:
    try:
        return _Loader(text, source).get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        what = f"character U+{error.character:04X} is not allowed in YAML"
        raise UserError(what, where=f"{source}:{line}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = source if mark is None else f"{source}:{mark.line + 1}"
        what = f"not YAML: {error.problem or error.context}"
        tab = "'\\t'" in what
        raise UserError(what, where=where, cure="indent with spaces, not tabs" if tab else None) from error


def _value(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], source: str) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, lines, source)
    if isinstance(node, yaml.SequenceNode):
        return [_item(item, (*path, i), lines, source) for i, item in enumerate(node.value)]
    assert isinstance(node, yaml.ScalarNode)
    return _scalar(node, f"{source}:{node.start_mark.line + 1}")


def _item(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], source: str) -> Any:
    lines[path] = node.start_mark.line + 1
    return _value(node, path, lines, source)


def _mapping(node: yaml.MappingNode, path: KeyPath, lines: dict[KeyPath, int], source: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    pairs: Iterable[tuple[yaml.Node, yaml.Node]] = node.value
    for key_node, value_node in pairs:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != TAG + "str":
            raise UserError("a key has to be a word", where=f"{source}:{line}")
        key = str(key_node.value)
        if key in values:
            first = lines[(*path, key)]
            raise UserError(f"`{key}` is said twice, first on line {first}", where=f"{source}:{line}")
        lines[(*path, key)] = line
        values[key] = _value(value_node, (*path, key), lines, source)
    return values


def _scalar(node: yaml.ScalarNode, where: str) -> str | int | float | bool | None:
    text: str = node.value
    kind = str(node.tag).removeprefix(TAG)
    if kind in ("int", "float") and len(text) > MOST_DIGITS:
        raise UserError(f"a number of {len(text)} characters", where=where)
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if kind == "float":
        number = math.nan if text[-1].isalpha() else float(text)
        if not math.isfinite(number):
            raise UserError(f"{text} is not a finite number", where=where)
        return number
    return text
