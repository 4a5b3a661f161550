"""From data files to a Store: tokenized in parallel, once, and cached under the name of the content.

file -scan-> digest, ranges -workers-> blocks in file order -Writer-> <cache>/<key>/ -open_part-> Store
One directory a source file, so adding a file rebuilds none of the others. Two processes that want the
same one take turns (where the file system has no locks both build, and the first rename counts).
"""

import dataclasses
import errno
import fcntl
import glob
import hashlib
import json
import secrets
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import IO, Self

from glm_accelerate.config.sources import Source
from glm_accelerate.data.other_forms import form_of, rows_of
from glm_accelerate.data.read import find_format, read_lines
from glm_accelerate.data.scan import RANGE_BYTES, Scan, identify, scan
from glm_accelerate.data.store import BrokenStore, SourcePart, Store, Writer, open_part
from glm_accelerate.data.templates import get_template
from glm_accelerate.data.tokenizers import load_tokenizer
from glm_accelerate.data.workers import EncodeSettings, EncodingRecipe, encode_ranges
from glm_accelerate.runtime.env import expanded
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.files import make_folder, open_private

__all__ = ["EncodeSettings", "prepare"]

# Bytes done, bytes in all: each counts once for reading, once for encoding.
Progress = Callable[[int, int], None]

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}


def prepare(
    sources: Sequence[Source],
    settings: EncodeSettings,
    model_dir: Path,
    *,
    cache: Path,
    workers: int,
    progress: Progress | None = None,
    range_bytes: int = RANGE_BYTES,
    check: bool = True,
) -> Store:
    """Opens what is cached and builds what is not, or is damaged: `check` reads all of it for that."""
    get_template(settings.template)  # its errors, and those of the tokenizer, come before any work
    fingerprint = load_tokenizer(model_dir, settings.template).fingerprint
    sources = [each for source in sources for each in _files(source)]
    paths = [expanded(source.path) for source in sources]
    meter = _Meter(2 * sum(identify(path).size for path in paths), progress)
    with _writable(cache):
        make_folder(cache)
        _sweep(cache)
    parts: list[SourcePart] = []
    for source, path in zip(sources, paths, strict=True):
        with StandIn(path, cache, source.first) as lines:
            scanned = scan(path, meter.add, range_bytes, lines, source.first)
            names = {key: tuple(getattr(source, key).items()) for key in ("columns", "tags")}
            named = dataclasses.replace(settings, **names)
            directory = cache / content_key(scanned.digest, named, fingerprint)
            recipe = EncodingRecipe(path, named, model_dir, path)
            parts.append(
                _open_or_build(directory, recipe, lines, scanned, source.weight, workers, meter, check)
            )
    for part in parts:
        _check_learnable(part)
    return Store(tuple(parts))


def _files(source: Source) -> list[Source]:
    """One a file, in the order of their names, where the path is a pattern such as data/*.jsonl."""
    path = expanded(source.path)
    if path.exists() or not glob.has_magic(source.path):
        return [source]
    found = sorted(glob.glob(str(path), recursive=True))
    if not found:
        raise UserError("no file has a name like this", where=path, cure="check data.train and data.dev")
    return [source.model_copy(update={"path": name}) for name in found]


class StandIn:
    """The file of JSON lines that stands for a file of another form, or for its `first` rows, made when it is
    asked for, in the cache. It is locked while it is in use, and gone afterwards.
    """

    def __init__(self, path: Path, cache: Path, first: int | None) -> None:
        self._path, self._cache, self._first, self._held = path, cache, first, ExitStack()
        self._made: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def __call__(self, read: Callable[[int], None]) -> Path:
        form = form_of(self._path)
        if form is None and self._first is None:
            return self._path
        if self._made is None:
            if form is None:
                read(identify(self._path).size)
                rows = ((place.line, text) for place, text in read_lines(self._path))
            else:
                rows = rows_of(self._path, form, read)
            rows = islice(rows, self._first)
            with _writable(self._cache):
                self._made = self._write(rows)
        return self._made

    def _write(self, rows: Iterator[tuple[int, bytes]]) -> Path:
        """Line N is the row with that number: lines between are empty, and passed over."""
        name = secrets.token_hex(8)
        new, made = (self._cache / f".{kind}-{name}" for kind in ("new", "lines"))
        file = self._held.enter_context(open_private(new, "wb"))
        with suppress(OSError):  # there are none on this file system
            fcntl.flock(file, fcntl.LOCK_EX)
        new.rename(made)  # from now on it is swept away if its lock is free
        self._held.callback(made.unlink, missing_ok=True)
        next_line = 1
        for number, text in rows:
            file.write(b"\n" * (number - next_line) + text + b"\n")
            next_line = number + 1
        file.flush()
        return made


def content_key(digest: str, settings: EncodeSettings, tokenizer: str) -> str:
    """Names everything that the prepared samples depend on."""
    content = {
        "version": get_template(settings.template).version,
        "content": digest,
        "tokenizer": tokenizer,
        **{key: value for key, value in dataclasses.asdict(settings).items() if value != ()},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:40]


def _open_or_build(
    directory: Path,
    recipe: EncodingRecipe,
    lines: "StandIn",
    scanned: Scan,
    weight: float,
    workers: int,
    meter: "_Meter",
    check: bool,
) -> SourcePart:
    with suppress(BrokenStore):
        part = open_part(directory, recipe.path, weight, check=check)
        meter.add(scanned.identity.size)
        return part
    with _turn(directory):
        damage = ""
        try:
            part = open_part(directory, recipe.path, weight)  # another process built it meanwhile
            meter.add(scanned.identity.size)
            return part
        except BrokenStore as error:
            if directory.exists():
                damage = f"what was prepared of {recipe.path} could not be used and was made anew: {error}"
        recipe = dataclasses.replace(recipe, lines=lines(lambda _: None))
        _build(directory, recipe, scanned, workers, meter)
        part = open_part(directory, recipe.path, weight, check=False)
        return dataclasses.replace(part, damage=damage)


def _build(directory: Path, recipe: EncodingRecipe, scanned: Scan, workers: int, meter: "_Meter") -> None:
    size = scanned.identity.size
    settings = recipe.settings
    format = find_format(recipe.path, settings.format, settings.columns, settings.tags)
    recipe = dataclasses.replace(recipe, settings=dataclasses.replace(settings, format=format))
    share = size / scanned.ranges[-1].stop  # of the lines that stand for it
    temporary = directory.parent / f".building-{directory.name}-{secrets.token_hex(4)}"
    done = written = 0

    def needed() -> int:
        return max(size, written * size // max(done, 1))

    try:
        with _writable(directory.parent, needed):
            if directory.exists():  # damaged
                shutil.rmtree(directory)
            make_folder(temporary)
            with (
                Writer(temporary) as writer,
                closing(encode_ranges(recipe, scanned.ranges, workers)) as blocks,
            ):
                for part, block in zip(scanned.ranges, blocks, strict=True):
                    writer.append(block)
                    done, written = round(part.stop * share), writer.bytes_written
                    meter.add(done - round(part.start * share))
                if identify(recipe.path) != scanned.identity:
                    raise UserError(
                        "the data file changed while it was read", where=recipe.path, cure="start again"
                    )
                writer.publish(directory, size)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # published, it has moved away


def _check_learnable(part: SourcePart) -> None:
    report = part.report
    if report.targets:
        return
    dropped = ", ".join(f"{count} {reason}" for reason, count in report.dropped.items())
    where = report.remarks[0].place if report.remarks else part.path
    cure = "look at the answers in it, data.train_on, data.max_tokens and data.overlong"
    what = f"no sample of this file has anything to train on: {dropped or 'it holds no sample'}"
    raise UserError(what, where=where, cure=cure)


@contextmanager
def _turn(directory: Path) -> Generator[None, None, None]:
    """Waits until no other process builds this directory."""
    with _writable(directory.parent):
        file = _lock_of(directory.parent, directory.name)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
        yield


def _sweep(cache: Path) -> None:
    """Removes what killed builders left behind: nobody holds their lock any more."""
    for leftover in cache.glob(".building-*-*"):
        # Its builder lives, or nobody can know, or the cache is read-only: the leftover harms nobody.
        with suppress(OSError), _lock_of(cache, leftover.name.split("-")[1]) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(leftover, ignore_errors=True)
    for leftover in cache.glob(".lines-*"):
        with suppress(OSError), leftover.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftover.unlink()


def _lock_of(cache: Path, key: str) -> IO[bytes]:
    make_folder(cache / "locks")
    return open_private(cache / "locks" / key, "ab")


@contextmanager
def _writable(cache: Path, needed: Callable[[], int] | None = None) -> Generator[None, None, None]:
    """Turns the errors of a full or forbidden disk into a UserError with the cure."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            room = f", about {needed():,} bytes are needed" if needed else ""
            cure = "free space there, or set data.cache to another disk"
            raise UserError(f"no room to keep the prepared data{room}", where=cache, cure=cure) from error
        if error.errno in _FORBIDDEN:
            cure = "set data.cache to a directory that you may write"
            raise UserError(
                f"cannot keep the prepared data: {error.strerror}", where=cache, cure=cure
            ) from error
        raise


class _Meter:
    """Adds up the bytes done and reports them."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def add(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)
