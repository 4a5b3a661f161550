"""Ranges of a file become blocks of encoded samples, in processes of their own, returned in file order.

Workers are plain interpreters on a socket, not `multiprocessing` children: they never import the program that
started them (no torch in each, no main guard asked of the user), Ctrl-C does not reach them, and the end of
their parent, however it ends, ends them. At most AHEAD ranges a worker are in flight, so memory is bounded.
"""

import os
import signal
import subprocess
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Literal

import numpy as np

from glm_accelerate.data.encode import (
    Encoded,
    Kept,
    Labels,
    Left,
    Overlong,
    Rendered,
    TrainOn,
    encode_rendered,
    render,
)
from glm_accelerate.data.held_out import content_number
from glm_accelerate.data.read import FormatName, find_format, parse_line, read_lines, skipping
from glm_accelerate.data.scan import Range
from glm_accelerate.data.store import REMARKS_KEPT, EncodedBlock, Remark
from glm_accelerate.data.templates import get_template
from glm_accelerate.data.tokenizers import load_tokenizer
from glm_accelerate.data.types import FilePlace
from glm_accelerate.runtime.child import python_command
from glm_accelerate.runtime.errors import UserError

AHEAD = 4
_FEWEST_RANGES = 2  # a worker that would get fewer costs more to start than it saves
_NOTHING = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class EncodeSettings:
    """How conversations become samples; the words are those of the config's `data` section."""

    template: str
    format: Literal["auto"] | FormatName = "auto"
    train_on: TrainOn = "all"
    labels: Labels = "exact"
    max_tokens: int = 2048
    overlong: Overlong = "truncate"
    skip_bad: int = 0
    columns: tuple[tuple[str, str], ...] = ()  # our names and those of the file
    tags: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class EncodingRecipe:
    """Everything a worker needs to know. The format is that of the whole file: a range in its middle must not
    decide by its own first line.
    """

    path: Path
    settings: EncodeSettings
    model_dir: Path
    lines: Path  # where they are: in `path`, or in a file that stands for it


@dataclass(frozen=True, slots=True)
class RangeOutcome:
    """What became of a range: its block, the errors of its bad lines, and the error that ended it, if any."""

    block: EncodedBlock
    bad: tuple[UserError, ...]
    fatal: UserError | None


def encode_ranges(
    recipe: EncodingRecipe, ranges: Sequence[Range], workers: int
) -> Generator[EncodedBlock, None, None]:
    """One block a range, in file order. The first error in the file is raised, whichever worker met it."""
    bad = 0
    with closing(_outcomes(recipe, ranges, min(workers, len(ranges) // _FEWEST_RANGES))) as outcomes:
        for outcome in outcomes:
            for error in outcome.bad:
                bad = skipping(error, bad, recipe.settings.skip_bad)
            if outcome.fatal is not None:
                raise outcome.fatal
            yield outcome.block


class Encoder:
    """Turns ranges of one file into outcomes; loads the tokenizer once."""

    def __init__(self, recipe: EncodingRecipe) -> None:
        self._recipe, self._settings = recipe, recipe.settings
        self._format: FormatName = find_format(
            recipe.lines, recipe.settings.format, recipe.settings.columns, recipe.settings.tags
        )
        self._template = get_template(recipe.settings.template)
        self._tokenizer = load_tokenizer(recipe.model_dir, recipe.settings.template)

    def __call__(self, part: Range) -> RangeOutcome:
        settings = self._settings
        rendered: list[Rendered] = []
        bad: list[tuple[FilePlace, UserError]] = []
        encoded: list[Encoded] = []
        contents: dict[int, int] = {}  # of each line
        fatal: UserError | None = None
        try:
            lines, name = self._recipe.lines, self._recipe.path
            for place, raw in read_lines(lines, part.start, part.stop, line=part.line, name=name):
                try:
                    conversation = parse_line(raw, place, self._format, settings.columns, settings.tags)
                    rendered.append(render(conversation, self._template, settings.train_on, settings.labels))
                    contents[place.line] = content_number(conversation)
                except UserError as error:
                    bad.append((place, error))
                    if len(bad) > settings.skip_bad:  # this range alone holds too many: the file ends here
                        break
            else:
                encoded = encode_rendered(
                    rendered, self._tokenizer, max_tokens=settings.max_tokens, overlong=settings.overlong
                )
        except UserError as error:
            fatal = error
        return RangeOutcome(_block(encoded, contents, bad), tuple(error for _, error in bad), fatal)


def _block(
    encoded: Sequence[Encoded], contents: Mapping[int, int], bad: Sequence[tuple[FilePlace, UserError]]
) -> EncodedBlock:
    kept = [one for one in encoded if isinstance(one, Kept)]
    left = [one for one in encoded if isinstance(one, Left)]
    shortened = [one for one in kept if one.truncated]
    tokens = np.concatenate([_NOTHING, *(one.tokens for one in kept)])
    targets = np.concatenate([_NOTHING, *(one.targets for one in kept)]).astype(np.bool_)
    remarks = [Remark(place, f"unreadable: {error.what}") for place, error in bad[:REMARKS_KEPT]]
    remarks += [Remark(one.place, f"truncated: {one.cut_from:,} tokens") for one in shortened[:REMARKS_KEPT]]
    for reason in {one.reason for one in left}:
        those = [one for one in left if one.reason == reason][:REMARKS_KEPT]
        remarks += [
            Remark(one.place, reason + (f": {one.tokens:,} tokens" if one.tokens else "")) for one in those
        ]
    return EncodedBlock(
        tokens=np.where(targets, ~tokens, tokens),
        lengths=np.array([len(one) for one in kept], np.int32),
        targets=np.array([int(one.targets.sum()) for one in kept], np.int32),
        lines=np.array([one.place.line for one in kept], np.int32),
        contents=np.array([contents[one.place.line] for one in kept], np.uint64),
        truncated=len(shortened),
        longest=max((*(one.cut_from for one in kept), *(one.tokens for one in left)), default=0),
        dropped=Counter(one.reason for one in left),
        bad=len(bad),
        remarks=tuple(remarks),
    )


def serve(descriptor: int) -> None:
    """A worker's life: one recipe, then ranges until the other end closes."""
    os.putenv("RAYON_NUM_THREADS", "1")  # the tokenizer's own threads would fight the other workers for cores
    with Connection(descriptor) as parent, suppress(EOFError, BrokenPipeError, ConnectionResetError):
        encoder = Encoder(parent.recv())
        while True:
            parent.send(encoder(parent.recv()))


class _Worker:
    """One process and our end of its socket."""

    def __init__(self, recipe: EncodingRecipe) -> None:
        self.socket, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                python_command(f"from {__name__} import serve; serve({theirs.fileno()})"),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for the parent, which then closes its workers
            )
        self._path, self._line = recipe.path, 1

    def send(self, message: EncodingRecipe | Range) -> None:
        if isinstance(message, Range):
            self._line = message.line
        try:
            self.socket.send(message)
        except OSError as error:
            raise self._death() from error

    def receive(self) -> RangeOutcome:
        try:
            return self.socket.recv()
        except (EOFError, OSError) as error:
            raise self._death() from error

    def close(self) -> None:
        self.socket.close()
        self._process.kill()
        self._process.wait()

    def _death(self) -> Exception:
        """The error that tells how the process ended."""
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:  # it closed its socket and yet lives
            self._process.kill()
            code = self._process.wait()
        who = f"worker process {self._process.pid}"
        if code < 0:
            what = f"{who} was killed by {signal.Signals(-code).name} while it prepared lines from here on"
            cure = "if memory ran out, set data.workers=1 or shorten the longest lines"
            return UserError(what, where=FilePlace(str(self._path), self._line), cure=cure)
        return RuntimeError(f"{who} ended with code {code}; its own message stands above")


def _outcomes(
    recipe: EncodingRecipe, ranges: Sequence[Range], workers: int
) -> Generator[RangeOutcome, None, None]:
    if workers <= 1:
        yield from map(Encoder(recipe), ranges)
        return
    with ExitStack() as stack:
        crew = [stack.enter_context(closing(_Worker(recipe))) for _ in range(workers)]
        for worker in crew:
            worker.send(recipe)
        yield from _in_order(crew, ranges)


def _in_order(crew: Sequence[_Worker], ranges: Sequence[Range]) -> Iterator[RangeOutcome]:
    idle = list(crew)
    busy: dict[int, tuple[_Worker, int]] = {}  # by the descriptor to wait for
    done: dict[int, RangeOutcome] = {}
    sent = 0
    for wanted in range(len(ranges)):
        while wanted not in done:
            while idle and sent < min(len(ranges), wanted + AHEAD * len(crew)):
                worker = idle.pop()
                worker.send(ranges[sent])
                busy[worker.socket.fileno()] = worker, sent
                sent += 1
            for descriptor in wait(list(busy)):
                assert isinstance(descriptor, int)
                worker, number = busy.pop(descriptor)
                done[number] = worker.receive()
                idle.append(worker)
        yield done.pop(wanted)
