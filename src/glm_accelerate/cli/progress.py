"""Progress of long work, on stderr: a bar on a terminal, which is gone when the work is done, else a line
every few seconds. Of bytes that are prepared (`watching`), or of what is counted (`counting`).
"""

import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from glm_accelerate.runtime.words import amount

SECONDS_BETWEEN_LINES = 5.0

Watch = Callable[[str, int, int], None]  # what, how much is done, of how much; 0: cannot be counted
Words = Callable[[str, int, int, float], str]  # the same, and how much a second


def watching(given: Console | None = None) -> "AbstractContextManager[Watch]":
    """Yields the function to tell of bytes. Nothing is shown for what is done at once."""
    return _showing(given, "preparing ", in_bytes, BytesColumn())


def counting(given: Console | None = None) -> "AbstractContextManager[Watch]":
    """Yields the function to tell of things. Nothing is shown for what is done at once."""
    return _showing(given, "", in_numbers, MofNCompleteColumn())


def in_bytes(what: str, done: int, total: int, rate: float) -> str:
    return f"preparing {what}: {amount(done)} of {amount(total)}, {amount(rate)}/s"


def in_numbers(what: str, done: int, total: int, rate: float) -> str:
    return f"{what}: {done:,} of {total:,}, {rate:,.1f} a second"


class BytesColumn(ProgressColumn):
    """How much is done, of how much, and how fast."""

    def render(self, task: Task) -> Text:
        speed = f", {amount(task.speed)}/s" if task.speed else ""
        return Text(f"{amount(task.completed)} of {amount(task.total or 0)}{speed}")


class Lines:
    """For logs: one line every few seconds. `named`: and one for whatever begins."""

    def __init__(
        self,
        console: Console,
        words: Words = in_bytes,
        seconds: float = SECONDS_BETWEEN_LINES,
        clock: Callable[[], float] = time.monotonic,
        named: bool = False,
    ) -> None:
        self._console, self._words, self._seconds, self._clock = console, words, seconds, clock
        self._named = named
        self._began: dict[str, float] = {}
        self._said = clock()

    def __call__(self, what: str, done: int, total: int) -> None:
        if not total or (self._named and what not in self._began):
            _name(self._console, what)
        if not total:
            return
        now = self._clock()
        began = self._began.setdefault(what, now)
        if now - self._said < self._seconds or not done or now == began:
            return
        self._said = now
        rate = done / (now - began)
        left = timedelta(seconds=round((total - done) / rate))
        line = f"{self._words(what, done, total, rate)}, {left} left"
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)


def _name(console: Console, what: str) -> None:
    """Of what cannot be counted."""
    console.print(f"{what} ...", style="dim", highlight=False, soft_wrap=True, markup=False)


@contextmanager
def _showing(
    given: Console | None, verb: str, words: Words, *figures: ProgressColumn
) -> Generator[Watch, None, None]:
    console = given or Console(stderr=True)
    if not console.is_terminal:
        yield Lines(console, words)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), *figures, TimeRemainingColumn())
    bars: Progress | None = None
    tasks: dict[str, TaskID] = {}

    def watch(what: str, done: int, total: int) -> None:
        nonlocal bars
        if not total:
            _name(console, what)
            return
        if bars is None and done < total:
            bars = Progress(*columns, console=console, transient=True)
            bars.start()
            tasks.clear()
        if bars is None:
            return
        if what not in tasks:
            tasks[what] = bars.add_task(f"{verb}{what}", total=total)
        bars.update(tasks[what], completed=done, total=total)
        if bars.finished:  # the terminal is free again for what follows
            bars.stop()
            bars = None

    try:
        yield watch
    finally:
        if bars is not None:
            bars.stop()
