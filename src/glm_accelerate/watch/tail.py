"""A run in a terminal, as its own training shows it, from anywhere: `watch RUN --tail`.

events.jsonl -> what is new -> the observer that training has, by the clock of the events
"""

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console

from glm_accelerate.observe.console import ConsoleObserver
from glm_accelerate.observe.events import BEGINNINGS, MOVED
from glm_accelerate.runtime.screen import say
from glm_accelerate.runtime.words import duration
from glm_accelerate.watch.run import WatchedRun

LOOK = 1.0  # seconds between two looks
SHOWN = 10  # steps of what was before, and so much of everything else
SILENT = 60.0  # seconds without an event after which that is said


def tail(run: WatchedRun, console: Console, pause: Callable[[float], None] = time.sleep) -> None:
    """Show it until it ends. `pause`: for tests, which do not wait."""
    newest = 0.0
    observer = ConsoleObserver(console, clock=lambda: newest, planned=run.about()["memory"])
    told, found = False, run.events(0)
    fresh = _recent(found["events"])
    if not fresh:
        say(console, f"{run.name} has not begun")
    try:
        while True:
            for event in fresh:
                newest, told = max(newest, event.get("time", 0.0)), False
                observer.observe(event)
            if fresh and fresh[-1]["kind"] == "stop" and fresh[-1].get("reason") != MOVED:
                return
            if newest and time.time() - newest > SILENT and not told:
                told, gone = True, run.gone()
                observer.close()
                for_long = f"no event for {duration(time.time() - newest)}"
                say(console, f"{for_long}{f', and {gone} is gone: it failed or was killed' if gone else ''}")
                for sentence in run.missed():
                    say(console, sentence)
                if gone:
                    return
            pause(LOOK)
            found = run.events(found["next"])
            fresh = found["events"]
    finally:
        observer.close()


def _recent(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of what was before: how it began the last time, and what came last."""
    began = max((place for place, event in enumerate(events) if event.get("kind") in BEGINNINGS), default=0)
    after = list(enumerate(events))[began:]
    steps = [place for place, event in after if event.get("kind") == "step"][-SHOWN:]
    others = [place for place, event in after if event.get("kind") != "step"][-SHOWN:]
    return [events[place] for place in sorted({began, *steps, *others})] if events else []
