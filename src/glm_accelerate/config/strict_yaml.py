"""YAML as a person means it: text -> plain values, and the line of each.

Scalars follow YAML 1.2 (1e-5 is a number, `yes` and 1:30 are text, 010 is ten); no key occurs twice;
there are no tags, aliases or infinities, and size and depth are bounded. This file alone imports yaml.
"""

import math
import re
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
    """The values of a YAML text, and where they are: `places[("optim", "clip")]` is the key's file:line."""

    values: dict[str, Any]
    places: dict[KeyPath, str]
    source: str

    def place(self, path: KeyPath) -> str:
        """Where the key is, or else the nearest section around it that is there."""
        around = (path[:length] for length in range(len(path), 0, -1))
        return next((self.places[part] for part in around if part in self.places), self.source)


def _resolvers(known: Resolvers) -> Resolvers:
    """By the first character of a plain scalar: the tags that it may have, in order."""
    table = {first: list(entries) for first, entries in known.items()}
    for tag, pattern, beginnings in PLAIN:
        for first in beginnings:
            table.setdefault(first, []).append((tag, re.compile(rf"(?:{pattern})\Z")))
    return table


class _Loader(yaml.SafeLoader):
    """Composes nodes only: values are built below, by hand, so no constructor ever runs."""

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

    def represent_scalar(self, tag: str, value: Any, style: str | None = None) -> yaml.ScalarNode:
        """U+0085 is escaped in double quotes alone; elsewhere it is a line break, read as a space. Lines
        stay lines where YAML can hold them so.
        """
        lines = "|" if "\n" in value else style
        return super().represent_scalar(tag, value, '"' if "\x85" in value else lines)


def read_document(text: str, source: str) -> Document:
    """Parse one YAML mapping. An empty text says nothing, and is an empty mapping."""
    check_size(len(text), source)
    node = _compose(text.removeprefix("\ufeff"), source)
    if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == TAG + "null"):
        return Document({}, {}, source)
    if not isinstance(node, yaml.MappingNode):
        raise UserError("expected `section: {key: value}`", where=_line(node, source))
    places: dict[KeyPath, str] = {}
    return Document(_mapping(node, (), places, source), places, source)


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


def check_size(characters: int, source: str) -> None:
    if characters > MOST_CHARACTERS:
        raise UserError(f"larger than {MOST_CHARACTERS >> 10} Ki characters", where=source, cure="a config?")


def _compose(text: str, source: str) -> yaml.Node | None:
    try:
        return _Loader(text, source).get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        if 0xDC80 <= error.character <= 0xDCFF:  # how Python holds a byte of a file's name that is no text
            what, cure = "a name that is not UTF-8 cannot stand in a config", "rename the file or link to it"
            raise UserError(what, where=source, cure=cure) from error
        what = f"character U+{error.character:04X} is not allowed in YAML"
        raise UserError(what, where=f"{source}:{line}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = source if mark is None else f"{source}:{mark.line + 1}"
        what = f"not YAML: {', '.join(part for part in (error.context, error.problem) if part)}"
        tab = "'\\t'" in what
        raise UserError(what, where=where, cure="indent with spaces, not tabs" if tab else None) from error


def _value(node: yaml.Node, path: KeyPath, places: dict[KeyPath, str], source: str) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, places, source)
    if isinstance(node, yaml.SequenceNode):
        values: list[Any] = []
        for i, item in enumerate(node.value):
            places[(*path, i)] = _line(item, source)
            values.append(_value(item, (*path, i), places, source))
        return values
    assert isinstance(node, yaml.ScalarNode)
    return _scalar(node, _line(node, source))


def _mapping(
    node: yaml.MappingNode, path: KeyPath, places: dict[KeyPath, str], source: str
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    pairs: list[tuple[yaml.Node, yaml.Node]] = node.value
    for key_node, value_node in pairs:
        where = _line(key_node, source)
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != TAG + "str":
            raise UserError("a key has to be a word", where=where)
        key: str = key_node.value
        if key in values:
            raise UserError(f"`{key}` is said twice, first at {places[(*path, key)]}", where=where)
        places[(*path, key)] = where
        values[key] = _value(value_node, (*path, key), places, source)
    return values


def _line(node: yaml.Node, source: str) -> str:
    return f"{source}:{node.start_mark.line + 1}"


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
