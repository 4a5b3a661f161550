"""Bytes of a data file as text: UTF-8, or an error that says what they are and how to convert the file."""

from contextlib import suppress
from pathlib import Path
from shlex import quote

from glm_accelerate.data.types import FilePlace
from glm_accelerate.runtime.errors import UserError

BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def decoded(raw: bytes, place: FilePlace) -> str:
    """One line as text."""
    if place.line == 1 and raw.startswith(_UTF16):
        raise UserError("is UTF-16, not UTF-8, at byte 0", where=place, cure=convert("UTF-16", place))
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"at byte {error.start} of the line"
        with suppress(UnicodeDecodeError):
            raw.decode("gb18030")
            cure = convert("GB18030", place)
            raise UserError(f"is not UTF-8 but likely GBK, {where}", where=place, cure=cure) from error
        raise UserError(f"is not UTF-8, {where}", where=place, cure="write the file as UTF-8") from error


def convert(encoding: str, place: FilePlace) -> str:
    """The command that writes the file as UTF-8."""
    return redirected(f"iconv -f {encoding} -t UTF-8", place.file, f"utf8-{Path(place.file).name}")


def redirected(command: str, source: str, name: str) -> str:
    """The command line that writes its result beside the source, under another name."""
    return f"{command} {quote(source)} > {quote(str(Path(source).with_name(name)))}"
