"""Ranges of a file become blocks of encoded samples, in processes of their own, handed back in file order.

Workers are plain interpreters on a socket, not `multiprocessing` children: they never import the program that
started them (no torch in each, no main guard asked of the user), Ctrl-C does not reach them, and the end of
their parent, however it ends, ends them. At most AHEAD ranges a worker are in flight, so memory is bounded.
"""

import os
import signal
import subprocess
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

from glm_accelerate.data.ranges import Encoder, EncodingRecipe, RangeOutcome
from glm_accelerate.data.scan import Range
from glm_accelerate.data.store import EncodedBlock
from glm_accelerate.data.types import FilePlace
from glm_accelerate.runtime.child import python_command
from glm_accelerate.runtime.errors import UserError

AHEAD = 4
_FEWEST_RANGES = 2  # a worker that would get fewer costs more to start than it saves


def encode_ranges(
    recipe: EncodingRecipe, ranges: Sequence[Range], workers: int
) -> Generator[EncodedBlock, None, None]:
    """One block a range, in file order. The first error in the file is raised, whoever met it first."""
    bad = 0
    with closing(_outcomes(recipe, ranges, min(workers, len(ranges) // _FEWEST_RANGES))) as outcomes:
        for outcome in outcomes:
            for fault in outcome.bad:
                bad += 1
                if bad > recipe.settings.skip_bad:
                    skipped = f", after {bad - 1} bad lines that were skipped" if bad > 1 else ""
                    raise UserError(fault.what + skipped, where=fault.where, cure=fault.cure)
            if outcome.fatal is not None:
                raise UserError(outcome.fatal.what, where=outcome.fatal.where, cure=outcome.fatal.cure)
            yield outcome.block


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
        self._recipe = recipe
        self._range: Range | None = None

    def introduce(self) -> None:
        self._send(self._recipe)

    def give(self, part: Range) -> None:
        self._range = part
        self._send(part)

    def take(self) -> RangeOutcome:
        try:
            return self.socket.recv()
        except (EOFError, OSError) as error:
            raise self._obituary() from error

    def close(self) -> None:
        self.socket.close()
        self._process.kill()
        self._process.wait()

    def _send(self, message: EncodingRecipe | Range) -> None:
        try:
            self.socket.send(message)
        except OSError as error:
            raise self._obituary() from error

    def _obituary(self) -> Exception:
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:  # it closed its socket and yet lives
            self._process.kill()
            code = self._process.wait()
        line = self._range.line if self._range else 1
        who = f"worker process {self._process.pid}"
        if code < 0:
            what = f"{who} was killed by {signal.Signals(-code).name} while it prepared lines from here on"
            cure = "if memory ran out, set data.workers=1 or shorten the longest lines"
            return UserError(what, where=FilePlace(str(self._recipe.path), line), cure=cure)
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
            worker.introduce()
        yield from _in_order(crew, ranges)


def _in_order(crew: Sequence[_Worker], ranges: Sequence[Range]) -> Iterator[RangeOutcome]:
    idle = list(crew)
    busy: dict[int, tuple[_Worker, int]] = {}  # by the descriptor to wait for
    done: dict[int, RangeOutcome] = {}
    handed = 0
    for wanted in range(len(ranges)):
        while wanted not in done:
            while idle and handed < min(len(ranges), wanted + AHEAD * len(crew)):
                worker = idle.pop()
                worker.give(ranges[handed])
                busy[worker.socket.fileno()] = worker, handed
                handed += 1
            for descriptor in wait(list(busy)):
                assert isinstance(descriptor, int)
                worker, number = busy.pop(descriptor)
                done[number] = worker.take()
                idle.append(worker)
        yield done.pop(wanted)
