"""Files that are not JSON lines, read as if they were, row by row: never more of them in memory.

packed (gzip, zstd, bzip2, xz) -> what is inside    JSON array -> an element a row
CSV -> a record a row, named by the first one       Parquet, Arrow -> a row a row
A row has the number of the line that it begins in, so that errors name places a person can open.
"""

import bz2
import csv
import gzip
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from io import BufferedReader, RawIOBase
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Literal, cast

from glm_accelerate.data.decode import BOM, decoded, redirected
from glm_accelerate.data.forms import with_turns
from glm_accelerate.data.types import FilePlace
from glm_accelerate.runtime.errors import UserError

Form = Literal["gzip", "zstd", "bzip2", "xz", "array", "csv", "parquet", "arrow", "arrow stream"]
Row = tuple[int, bytes]  # its number, and the text of one JSON object

_MAGIC: tuple[tuple[bytes, Form], ...] = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"PAR1", "parquet"),
    (b"ARROW1", "arrow"),
    (b"\xff\xff\xff\xff", "arrow stream"),
)
_HEAD = 1 << 12  # bytes that tell the form
_PORTION = 1 << 20
_MOST = 1 << 28  # bytes of a row: a quote that never ends must not fill the memory
_ROWS = 256  # of a table, made Python objects at a time
_TOKEN = re.compile(
    rb'"(?:[^"\\]++|\\.)*+"|["\[\]{},]', re.DOTALL
)  # a string, a lone quote, a bracket, a comma


def form_of(path: Path) -> Form | None:
    """None for what is read as JSON lines; UserError for archives."""
    try:
        if not path.is_file():  # a pipe can be read only once
            return None
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError:  # reported when its lines are read
        return None
    if head.startswith(b"PK\x03\x04"):
        beside = f"lines-{path.name.partition('.')[0]}.jsonl"
        raise UserError("is packed with zip", where=path, cure=redirected("unzip -p", str(path), beside))
    return next((form for magic, form in _MAGIC if head.startswith(magic)), None) or _text_form(head, path)


def rows_of(path: Path, form: Form, read: Callable[[int], None] | None = None) -> Iterator[Row]:
    """Their numbers grow. Calls `read` with the number of bytes just done."""
    done = 0
    try:
        with path.open("rb") as raw:
            unpack = _PACKED.get(form)
            file = cast(BufferedReader, unpack(raw)) if unpack else raw
            inside = _text_form(file.peek(_HEAD), path) or "lines" if unpack else form
            for row in _READERS[inside](file, path):
                yield row
                if read is not None and (now := raw.tell()) > done:
                    read(now - done)
                    done = now
    except (OSError, EOFError, ValueError, NotImplementedError, zlib.error, lzma.LZMAError) as error:
        cure = "is the file whole? Make or copy it again"
        raise UserError(f"cannot be read as {form}: {error}", where=path, cure=cure) from error


def _text_form(head: bytes, path: Path) -> Form | None:
    """Of a file of text; what is packed has two suffixes, as rows.csv.gz."""
    if {".csv", ".tsv"} & set(path.suffixes[-2:]):
        return "csv"
    return "array" if head.removeprefix(BOM).lstrip()[:1] == b"[" else None


def _lines(file: IO[bytes], path: Path) -> Iterator[Row]:
    for number, line in enumerate(file, 1):
        text = line.removeprefix(BOM) if number == 1 else line
        if text.strip():
            yield number, text.rstrip(b"\r\n")


def _array(file: IO[bytes], path: Path) -> Iterator[Row]:
    """Elements are cut apart, not understood: a broken one is an error of its own row."""
    last = 0
    for line, text in _elements(file, path):
        last = max(last + 1, line)  # those side by side on one line are counted
        yield last, text.replace(b"\r", b" ").replace(b"\n", b" ").strip()


def _elements(file: IO[bytes], path: Path) -> Iterator[Row]:
    """What is between the commas of the outermost array, and the lines in which it begins."""
    text = file.read(_PORTION)
    start = scanned = text.index(b"[") + 1
    line, depth, elements = 1 + text.count(b"\n", 0, start), 0, 0
    while True:
        for token in _TOKEN.finditer(text, scanned):
            mark = token[0]
            if mark == b'"':  # a string that goes on in the next portion
                break
            scanned = token.end()
            depth += (mark in b"[{") - (mark in b"]}")
            if depth > 0 or (depth == 0 and mark != b","):
                continue
            element = text[start : token.start()]
            blank = len(element) - len(element.lstrip())
            if blank < len(element):
                yield line + element.count(b"\n", 0, blank), element
            elif elements or depth == 0:
                raise UserError("nothing beside a comma", where=f"{path}:{line}", cure="remove the comma")
            line, start, elements = line + element.count(b"\n"), scanned, elements + 1
            if depth < 0:
                if (text[start:] + file.read(_HEAD)).strip():
                    cure = "write one array, or one object a line"
                    raise UserError("something follows the array", where=f"{path}:{line}", cure=cure)
                return
        text, scanned, start = text[start:], scanned - start, 0
        if len(text) > _MOST:
            what = f"an element of more than {_MOST >> 20} MiB: does a quote in it never end?"
            raise UserError(what, where=f"{path}:{line}", cure="end it")
        portion = file.read(max(_PORTION, len(text)))
        if not portion:
            raise EOFError("the array does not end")
        text += portion


def _csv(file: IO[bytes], path: Path) -> Iterator[Row]:
    def lines() -> Iterator[str]:
        for number, raw in enumerate(file, 1):
            yield decoded(raw.removeprefix(BOM) if number == 1 else raw, FilePlace(str(path), number))

    source = lines()
    first = next(source, "")
    csv.field_size_limit(_MOST)
    records = csv.reader(chain([first], source), delimiter=max(",;\t", key=first.count), strict=True)
    begins = 1
    try:
        names = next(records, [])
        if len({name for name in names if name}) < len(names):
            cure = "name each column in the first line, each otherwise"
            raise UserError("columns without a name of their own", where=f"{path}:1", cure=cure)
        begins = records.line_num + 1
        for cells in records:
            number, begins = begins, records.line_num + 1
            if cells and len(cells) != len(names):
                what = f"{len(cells)} cells, where the first line names {len(names)} columns"
                raise UserError(
                    what, where=f"{path}:{number}", cure="quote cells that hold commas or line ends"
                )
            if any(cells):  # an empty cell is no value
                yield number, _object({name: cell for name, cell in zip(names, cells, strict=True) if cell})
    except csv.Error as error:
        cure = "a cell with a quote, comma or line end stands in quotes, a quote in it twice"
        raise UserError(f"broken CSV: {error}", where=f"{path}:{begins}", cure=cure) from error


def _table(file: IO[bytes], path: Path) -> Iterator[Row]:
    number = 0
    for batch in _batches(file, path):
        for start in range(0, batch.num_rows, _ROWS):
            for row in batch.slice(start, _ROWS).to_pylist():
                number += 1
                yield number, _object(_without_none(row))


def _batches(file: IO[bytes], path: Path) -> Iterator[Any]:
    ipc = _package("pyarrow.ipc", "parquet", path)
    head = file.read(6)
    file.seek(0)
    if head.startswith(b"PAR1"):
        parquet = _package("pyarrow.parquet", "parquet", path)
        yield from parquet.ParquetFile(file).iter_batches(batch_size=_ROWS, use_threads=False)
    elif head == b"ARROW1":
        reader = ipc.open_file(file)
        yield from map(reader.get_batch, range(reader.num_record_batches))
    else:
        yield from ipc.open_stream(file)


def _object(row: dict[str, Any]) -> bytes:
    """As a line of JSON. Tables have lists of turns as JSON text."""
    return json.dumps(with_turns(row), ensure_ascii=False, default=_as_text).encode()


def _without_none(value: Any) -> Any:
    """Tables give every object the keys of all others: the author never wrote those."""
    if isinstance(value, dict):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list) else value


def _as_text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _zstd(raw: IO[bytes]) -> IO[bytes]:
    return BufferedReader(_Unpacked(_zstd_portions(raw)), _PORTION)


def _zstd_portions(raw: IO[bytes]) -> Iterator[bytes]:
    """Frame by frame: the package's own reader takes a file that is cut off for a whole one."""
    zstandard = _package("zstandard", "zstd", raw.name)
    frame = None
    try:
        while portion := raw.read(1 << 16):
            while portion:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(portion)
                portion, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    except zstandard.ZstdError as error:
        raise ValueError(error) from error
    if frame is not None:
        raise EOFError("the file is cut off")


class _Unpacked(RawIOBase):
    """Portions of bytes as a file."""

    def __init__(self, portions: Iterator[bytes]) -> None:
        self._portions, self._rest = portions, b""

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self._rest:
            portion = next(self._portions, None)
            if portion is None:
                return 0
            self._rest = portion
        count = min(len(target), len(self._rest))
        target[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def _package(name: str, extra: str, path: object) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        package, cure = name.partition(".")[0], f'pip install "glm-accelerate[{extra}]"'
        raise UserError(
            f"{package} is not installed: it is needed to read this", where=path, cure=cure
        ) from error


_PACKED: Mapping[str, Callable[[IO[bytes]], Any]] = {
    "gzip": gzip.open,
    "zstd": _zstd,
    "bzip2": bz2.open,
    "xz": lzma.open,
}
_READERS: Mapping[str, Callable[[IO[bytes], Path], Iterator[Row]]] = {
    "lines": _lines,
    "array": _array,
    "csv": _csv,
    **dict.fromkeys(("parquet", "arrow", "arrow stream"), _table),
}
