"""A JSONL file, line by line: bytes -> strict JSON -> Conversation. Errors name file and line.

Lines end at the byte `\\n` and nowhere else: U+2028 and its like are ordinary characters inside a text. At
most one line is in memory, and a range of bytes can be read by itself, so that processes share a file.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any, Literal, cast

from glm_accelerate.data import strict_json
from glm_accelerate.data.forms import FormatName, conversation, format_of
from glm_accelerate.data.types import Conversation, FilePlace
from glm_accelerate.runtime.env import expanded
from glm_accelerate.runtime.errors import UserError

__all__ = ["FormatName", "find_format", "parse_line", "read", "read_lines"]

_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
# The first bytes of a packed file, its kind, and the command that unpacks it.
_PACKED = (
    (b"\x1f\x8b", "gzip", "gzip -dc"),
    (b"\x28\xb5\x2f\xfd", "zstd", "zstd -dc"),
    (b"BZh", "bzip2", "bzip2 -dc"),
    (b"\xfd7zXZ\x00", "xz", "xz -dc"),
    (b"PK\x03\x04", "zip", "unzip -p"),
)
_FROM_PARQUET = (
    "python -c 'import pandas, sys; pandas.read_parquet(sys.argv[1])"
    '.to_json(sys.argv[2], orient="records", lines=True, force_ascii=False)\''
)
_DETECT_LINES = 100


def read(
    path: Path, format: Literal["auto"] | FormatName = "auto", skip_bad: int = 0
) -> Iterator[Conversation]:
    """Every line of a file. The bad line after `skip_bad` others is an error, as is a file without lines."""
    path = expanded(path)
    bad = lines = 0
    detected = find_format(path, format)
    for place, raw in read_lines(path):
        lines += 1
        try:
            yield parse_line(raw, place, detected)
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


def read_lines(
    path: Path, start: int = 0, end: int | None = None, *, line: int = 1
) -> Iterator[tuple[FilePlace, bytes]]:
    """The lines whose first byte is in start..end-1, without line ends; blank ones are skipped.

    `line` is the number of the first of them.
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
                    yield FilePlace(str(path), number), body.rstrip(b"\r\n")
                position += len(raw)
                number += 1
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=path, cure="check data.train") from error


def find_format(path: Path, format: Literal["auto"] | FormatName = "auto") -> FormatName:
    """`auto`: by the keys of the first readable line. A packed file is refused as a whole."""
    _refuse_packed(path)
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


def parse_line(raw: bytes, place: FilePlace, format: FormatName) -> Conversation:
    """One line; UserError with file, line and, for broken JSON, column."""
    return conversation(_object(raw, place), format, place)


def _no_lines(path: Path) -> UserError:
    return UserError("the data file is empty", where=path, cure="one JSON object a line is expected")


def _refuse_packed(path: Path) -> None:
    first = b""
    with suppress(OSError):  # reported when its lines are read
        if path.is_file():  # a pipe can be read only once
            with path.open("rb") as file:
                first = file.read(8)
    beside = path.with_name(f"lines-{path.name.partition('.')[0]}.jsonl")
    if first.startswith(b"PAR1"):
        cure = f"{_FROM_PARQUET} {quote(str(path))} {quote(str(beside))}"
        raise UserError("is a parquet file, not JSON lines", where=path, cure=cure)
    for magic, kind, command in _PACKED:
        if first.startswith(magic):
            cure = _redirected(command, str(path), beside.name)
            raise UserError(f"is packed with {kind}", where=path, cure=cure)


def _object(raw: bytes, place: FilePlace) -> dict[str, Any]:
    text = _decoded(raw, place)
    try:
        line = strict_json.parse(text)
    except json.JSONDecodeError as error:
        raise _broken(text, error, place) from error
    except UserError as error:
        raise UserError(error.what, where=place, cure=error.cure) from error
    if not isinstance(line, dict):
        kind = "an array" if isinstance(line, list) else type(line).__name__
        whole = isinstance(line, list) and place.line == 1
        cure = _divide(place) if whole else "write one {...} a line"
        raise UserError(f"a line is {kind}, not an object", where=place, cure=cure)
    return cast(dict[str, Any], line)


def _decoded(raw: bytes, place: FilePlace) -> str:
    if place.line == 1 and raw.startswith(_UTF16):
        raise UserError("is UTF-16, not UTF-8, at byte 0", where=place, cure=_convert("UTF-16", place))
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"at byte {error.start} of the line"
        with suppress(UnicodeDecodeError):
            raw.decode("gb18030")
            cure = _convert("GB18030", place)
            raise UserError(f"is not UTF-8 but likely GBK, {where}", where=place, cure=cure) from error
        raise UserError(f"is not UTF-8, {where}", where=place, cure="write the file as UTF-8") from error


def _convert(encoding: str, place: FilePlace) -> str:
    return _redirected(f"iconv -f {encoding} -t UTF-8", place.file, f"utf8-{Path(place.file).name}")


def _divide(place: FilePlace) -> str:
    return _redirected("jq -c '.[]'", place.file, f"lines-{Path(place.file).stem}.jsonl")


def _redirected(command: str, source: str, name: str) -> str:
    """The command line that writes its result beside the source, under another name."""
    return f"{command} {quote(source)} > {quote(str(Path(source).with_name(name)))}"


def _broken(text: str, error: json.JSONDecodeError, place: FilePlace) -> UserError:
    where = f"{place}:{error.colno}"
    if "\0" in text:
        return UserError("NUL bytes: is the file UTF-16?", where=where, cure=_convert("UTF-16LE", place))
    if place.line == 1 and text.lstrip().startswith("["):
        what = "the file is one JSON array, not one object a line"
        return UserError(what, where=where, cure=_divide(place))
    excerpt = text[max(0, error.pos - 20) : error.pos + 20]
    return UserError(
        f"broken JSON: {error.msg} near {excerpt!r}", where=where, cure="mend or remove the line"
    )
