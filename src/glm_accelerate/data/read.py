"""A JSONL file, line by line: bytes -> strict JSON -> Conversation. What is wrong is said with its place.

Lines end at the byte `\\n` and nowhere else: U+2028 and its like are ordinary characters inside a text. At
most one line is in memory, and a range of bytes can be read by itself, so that processes share a file.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

from glm_accelerate.data import strict_json
from glm_accelerate.data.forms import FormatName, conversation, format_of
from glm_accelerate.data.types import Conversation, Place
from glm_accelerate.runtime.errors import UserError

__all__ = ["FormatName", "find_format", "parse_line", "read", "read_lines"]

_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_DETECT_LINES = 100


def read(
    path: Path, format: Literal["auto"] | FormatName = "auto", skip_bad: int = 0
) -> Iterator[Conversation]:
    """Every line of a file. The bad line after `skip_bad` others is an error, as is a file without lines."""
    bad = lines = 0
    found = find_format(path, format)
    for place, raw in read_lines(path):
        lines += 1
        try:
            yield parse_line(raw, place, found)
        except UserError as error:
            bad += 1
            if bad > skip_bad:
                skipped = f", after {bad - 1} bad lines that were skipped" if bad > 1 else ""
                raise UserError(error.what + skipped, where=error.where, cure=error.cure) from error
    if not lines:
        raise _no_lines(path)


def read_lines(
    path: Path, start: int = 0, end: int | None = None, *, line: int = 1
) -> Iterator[tuple[Place, bytes]]:
    """The lines whose first byte lies in start..end-1, without line ends; blank ones are passed over.

    `line` is the number of the first of them, counted by whoever divided the file.
    """
    try:
        with path.open("rb") as file:
            if start:
                file.seek(start - 1)
                file.readline()  # a line that began before belongs to the range before
            position = file.tell()
            number = line
            while (end is None or position < end) and (raw := file.readline()):
                body = raw.removeprefix(_BOM) if position == 0 else raw
                if body.strip(b" \t\r\n"):
                    yield Place(str(path), number), body.rstrip(b"\r\n")
                position += len(raw)
                number += 1
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=path, cure="check data.train") from error


def find_format(path: Path, format: Literal["auto"] | FormatName = "auto") -> FormatName:
    """`auto`: what the keys of the first readable line say."""
    if format != "auto":
        return format
    first: UserError | None = None
    for place, raw in read_lines(path):
        try:
            return format_of(_object(raw, place), place)
        except UserError as error:
            first = first or error
            if place.line >= _DETECT_LINES:
                break
    raise first or _no_lines(path)


def parse_line(raw: bytes, place: Place, format: FormatName) -> Conversation:
    """One line; UserError with file, line and, for broken JSON, column."""
    return conversation(_object(raw, place), format, place)


def _no_lines(path: Path) -> UserError:
    return UserError("the data file is empty", where=path, cure="one JSON object a line is expected")


def _object(raw: bytes, place: Place) -> dict[str, Any]:
    text = _text(raw, place)
    try:
        said = strict_json.parse(text)
    except json.JSONDecodeError as error:
        raise _broken(text, error, place) from error
    except UserError as error:
        raise UserError(error.what, where=place, cure=error.cure) from error
    if not isinstance(said, dict):
        kind = "an array" if isinstance(said, list) else type(said).__name__
        raise UserError(f"a line is {kind}, not an object", where=place, cure="write one {...} a line")
    return cast(dict[str, Any], said)


def _text(raw: bytes, place: Place) -> str:
    if place.line == 1 and raw.startswith(_UTF16):
        raise UserError("is UTF-16, not UTF-8, at byte 0", where=place, cure=_convert("UTF-16", place))
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"at byte {error.start} of the line"
        if _decodes(raw, "gb18030"):
            cure = _convert("GB18030", place)
            raise UserError(f"is not UTF-8 but likely GBK, {where}", where=place, cure=cure) from error
        raise UserError(f"is not UTF-8, {where}", where=place, cure="write the file as UTF-8") from error


def _decodes(raw: bytes, encoding: str) -> bool:
    try:
        raw.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True


def _convert(encoding: str, place: Place) -> str:
    name = Path(place.file).name
    return f"iconv -f {encoding} -t UTF-8 {name} > utf8-{name}"


def _broken(text: str, error: json.JSONDecodeError, place: Place) -> UserError:
    where = f"{place}:{error.colno}"
    if "\0" in text:
        return UserError("NUL bytes: is the file UTF-16?", where=where, cure=_convert("UTF-16LE", place))
    if place.line == 1 and text.lstrip().startswith("["):
        name = Path(place.file).name
        cure = f"jq -c '.[]' {name} > {Path(name).stem}.jsonl"
        return UserError("the file is one JSON array, not one object a line", where=where, cure=cure)
    excerpt = text[max(0, error.pos - 20) : error.pos + 20]
    return UserError(
        f"broken JSON: {error.msg} near {excerpt!r}", where=where, cure="mend or remove the line"
    )
