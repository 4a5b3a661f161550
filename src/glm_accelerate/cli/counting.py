"""Progress of what is counted, on stderr: a bar on a terminal, else a line every few seconds."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 5.0

Count = Callable[[str, int, int], None]  # what, how many are done, of how many


@contextmanager
def counting(given: Console | None = None) -> Generator[Count, None, None]:
    """Yields the function to tell. Nothing is shown for what is done at once."""
    console = given or Console(stderr=True)
    if not console.is_terminal:
        yield Lines(console)
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def count(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield count


class Lines:
    """For logs."""

    def __init__(
        self,
        console: Console,
        seconds: float = SECONDS_BETWEEN_LINES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._seconds, self._clock = console, seconds, clock
        self._began: dict[str, float] = {}
        self._said = clock()

    def __call__(self, what: str, done: int, total: int) -> None:
        now = self._clock()
        began = self._began.setdefault(what, now)
        if now - self._said < self._seconds or not done or now == began:
            return
        self._said = now
        rate = done / (now - began)
        left = timedelta(seconds=round((total - done) / rate))
        said = f"{what}: {done:,} of {total:,}, {rate:,.1f} a second, {left} left"
        self._console.print(said, highlight=False, soft_wrap=True)
