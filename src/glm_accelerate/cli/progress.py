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
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from glm_accelerate.runtime.screen import say
from glm_accelerate.runtime.words import amount

SECONDS_BETWEEN_LINES = 5.0

Watch = Callable[[str, int, int], None]  # what, how much is done, of how much; 0: cannot be counted
Words = Callable[[str, int, int, float], str]  # the same, and how much a second


def watching() -> AbstractContextManager[Watch]:
    """Yields the function to tell of bytes. Nothing is shown for what is done at once."""
    return _showing(Console(stderr=True), "preparing ", in_bytes, BytesColumn())


def counting(console: Console | None = None, *, named: bool = False) -> AbstractContextManager[Watch]:
    """Yields the function to tell of things. Nothing is shown for what is done at once. `named`: without a
    terminal whatever begins has a line of its own.
    """
    return _showing(console or Console(stderr=True), "", in_numbers, MofNCompleteColumn(), named=named)


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
        self._last_line = clock()

    def __call__(self, what: str, done: int, total: int) -> None:
        if not total or (self._named and what not in self._began):
            say(self._console, f"{what} ...", style="dim")
        if not total:
            return
        now = self._clock()
        began = self._began.setdefault(what, now)
        if now - self._last_line < self._seconds or not done or now == began:
            return
        self._last_line = now
        rate = done / (now - began)
        left = timedelta(seconds=round((total - done) / rate))
        say(self._console, f"{self._words(what, done, total, rate)}, {left} left")


@contextmanager
def _showing(
    console: Console, verb: str, words: Words, figures: ProgressColumn, *, named: bool = False
) -> Generator[Watch]:
    if not console.is_terminal:
        yield Lines(console, words, named=named)
        return
    bar: Progress | None = None
    shown = ""

    def watch(what: str, done: int, total: int) -> None:
        nonlocal bar, shown
        if not total:
            say(console, f"{what} ...", style="dim")
            return
        if bar is not None and what != shown:
            bar.stop()
            bar = None
        if bar is None and done < total:
            columns = (TextColumn("{task.description}"), BarColumn(), figures, TimeRemainingColumn())
            bar, shown = Progress(*columns, console=console, transient=True), what
            bar.add_task(f"{verb}{what}")
            bar.start()
        if bar is not None:
            bar.update(bar.task_ids[0], completed=done, total=total)
            if bar.finished:  # the terminal is free again for what follows
                bar.stop()
                bar = None

    try:
        yield watch
    finally:
        if bar is not None:
            bar.stop()
