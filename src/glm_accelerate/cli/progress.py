"""Progress of long preparations, on stderr: a bar on a terminal, else a line every few seconds."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

SECONDS_BETWEEN_LINES = 5.0

Watch = Callable[[str, int, int], None]  # what, bytes done, bytes in all


@contextmanager
def watching(given: Console | None = None) -> Generator[Watch, None, None]:
    """Yields the function to tell. Nothing is shown for what is done at once."""
    console = given or Console(stderr=True)
    if not console.is_terminal:
        yield Lines(console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def watch(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(f"preparing {what}", total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield watch


class Lines:
    """For logs: one line every few seconds."""

    def __init__(self, console: Console, seconds: float = SECONDS_BETWEEN_LINES) -> None:
        self._console, self._seconds = console, seconds
        self._began: dict[str, float] = {}
        self._said = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        began = self._began.setdefault(what, now)
        if now - self._said < self._seconds or not done or now == began:
            return
        self._said = now
        rate = done / (now - began)
        left = timedelta(seconds=round((total - done) / rate))
        self._console.print(
            f"preparing {what}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB, "
            f"{rate / 1e6:.1f} MB/s, {left} left",
            highlight=False,
            soft_wrap=True,
        )
