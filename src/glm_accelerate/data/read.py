"""A JSONL file, line by line: bytes -> strict JSON -> Conversation. Errors name file and line.

Lines end at the byte `\\n` and nowhere else: U+2028 and its like are ordinary characters inside a text. At
most one line is in memory, and a range of bytes can be read by itself, so that processes share a file.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

from glm_accelerate.data import strict_json
from glm_accelerate.data.decode import BOM, convert, decoded
from glm_accelerate.data.forms import FormatName, Names, conversation, format_of, renamed
from glm_accelerate.data.other_forms import form_of, rows_of
from glm_accelerate.data.types import Conversation, FilePlace
from glm_accelerate.runtime.env import expanded
from glm_accelerate.runtime.errors import UserError

__all__ = ["FormatName", "find_format", "parse_line", "read", "read_lines", "read_rows"]

_DETECT_LINES = 100


def read(
    path: Path,
    format: Literal["auto"] | FormatName = "auto",
    skip_bad: int = 0,
    columns: Names = (),
    tags: Names = (),
) -> Iterator[Conversation]:
    """Every line of a file. The bad line after `skip_bad` others is an error, as is a file without lines."""
    path = expanded(path)
    bad = lines = 0
    detected = find_format(path, format, columns, tags)
    for place, raw in read_rows(path):
        lines += 1
        try:
            yield parse_line(raw, place, detected, columns, tags)
        except UserError as error:
            bad = skipping(error, bad, skip_bad)
    if not lines:
        raise _no_lines(path)


def skipping(error: UserError, skipped: int, allowed: int) -> int:
    """Skips one more bad line; raises its error if as many as allowed have been skipped before it."""
    if skipped < allowed:
        return skipped + 1
    after = f", after {skipped} bad lines that were skipped" if skipped else ""
    raise UserError(error.what + after, where=error.where, cure=error.cure) from error


def read_rows(path: Path) -> Iterator[tuple[FilePlace, bytes]]:
    """Everything in a file of any form, as lines."""
    form = form_of(path)
    if form is None:
        yield from read_lines(path)
    else:
        yield from ((FilePlace(str(path), number), text) for number, text in rows_of(path, form))


def read_lines(
    path: Path, start: int = 0, end: int | None = None, *, line: int = 1, name: Path | None = None
) -> Iterator[tuple[FilePlace, bytes]]:
    """The lines whose first byte is in start..end-1, without line ends; blank ones are skipped.

    `line` is the number of the first of them, `name` the file that they stand for.
    """
    try:
        with path.open("rb") as file:
            if start:
                file.seek(start - 1)
                file.readline()  # a line that began before belongs to the range before
            position = file.tell()
            number = line
            while (end is None or position < end) and (raw := file.readline()):
                body = raw.removeprefix(BOM) if position == 0 else raw
                if body.strip(b" \t\r\n"):
                    yield FilePlace(str(name or path), number), body.rstrip(b"\r\n")
                position += len(raw)
                number += 1
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=path, cure="check data.train") from error


def find_format(
    path: Path, format: Literal["auto"] | FormatName = "auto", columns: Names = (), tags: Names = ()
) -> FormatName:
    """`auto`: by the keys of the first readable line."""
    if format != "auto":
        return format
    first: UserError | None = None
    for place, raw in read_rows(path):
        try:
            return format_of(renamed(_object(raw, place), columns, tags), place)
        except UserError as error:
            first = first or error
            if place.line >= _DETECT_LINES:
                break
    raise first or _no_lines(path)


def parse_line(
    raw: bytes, place: FilePlace, format: FormatName, columns: Names = (), tags: Names = ()
) -> Conversation:
    """One line; UserError with file, line and, for broken JSON, column."""
    return conversation(renamed(_object(raw, place), columns, tags), format, place)


def _no_lines(path: Path) -> UserError:
    return UserError("the data file is empty", where=path, cure="one JSON object a line is expected")


def _object(raw: bytes, place: FilePlace) -> dict[str, Any]:
    text = decoded(raw, place)
    try:
        line = strict_json.parse(text)
    except json.JSONDecodeError as error:
        raise _broken(text, error, place) from error
    except UserError as error:
        raise UserError(error.what, where=place, cure=error.cure) from error
    if not isinstance(line, dict):
        kind = "an array" if isinstance(line, list) else type(line).__name__
        raise UserError(f"a line is {kind}, not an object", where=place, cure="write one {...} a line")
    return cast(dict[str, Any], line)


def _broken(text: str, error: json.JSONDecodeError, place: FilePlace) -> UserError:
    where = f"{place}:{error.colno}"
    if "\0" in text:
        return UserError("NUL bytes: is the file UTF-16?", where=where, cure=convert("UTF-16LE", place))
    excerpt = text[max(0, error.pos - 20) : error.pos + 20]
    return UserError(
        f"broken JSON: {error.msg} near {excerpt!r}",
        where=where,
        cure="mend or remove the line, or set data.skip_bad",
    )
