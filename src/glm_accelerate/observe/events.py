"""What happens in a run, as a stream of small events: one strict-JSON object a line in events.jsonl.

loop -emit-> Events -observe-> EventLog, console, sinks
Observers look and never touch: one that cannot write is left out, and training goes on.
"""

import errno
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

Event = Mapping[str, object]

REPEATABLE = ("step", "checkpoint", "snapshot", "eval")  # a resumed run does these again for the same step
BEGINNINGS = ("start", "resume")  # events of earlier attempts beyond their step are no longer part of the run
MOVED = "the stages move"  # why an attempt stopped that goes on at once
TAIL_BYTES = 1 << 16
FULL = (errno.ENOSPC, errno.EDQUOT)  # a lack of room may pass


class Observer(Protocol):
    """Whoever is told what happens."""

    def observe(self, event: Event) -> None: ...

    def close(self) -> None: ...


class Events:
    """Adds time, kind and attempt to what happened, and tells every observer."""

    def __init__(self, observers: Iterable[Observer], attempt: int) -> None:
        self._observers = list(observers)
        self._attempt = attempt
        self._missed: dict[int, int] = {}  # number of events, by the id of the observer without room for them

    def emit(self, kind: str, fields: Mapping[str, object]) -> None:
        """An observer that cannot write is dropped, unless it only lacks room; the others are told."""
        event: Event = {"time": time.time(), "kind": kind, "attempt": self._attempt, **fields}
        failures: list[str] = []
        for observer in tuple(self._observers):
            name = type(observer).__name__
            try:
                observer.observe(event)
                if missed := self._missed.pop(id(observer), 0):
                    failures.append(f"{name} writes again: {missed} events are missing there")
            except OSError as error:
                if error.errno in FULL:
                    self._missed[id(observer)] = missed = self._missed.get(id(observer), 0) + 1
                    if missed == 1:
                        failures.append(f"{name} is left out until there is room: {error}")
                else:
                    self._observers.remove(observer)
                    failures.append(f"{name} is left out from here on: {error}")
        for failure in failures:
            self.emit("warning", {"said": failure})

    def close(self) -> None:
        """Let every observer write what it still holds. There is nobody left to tell of a failure."""
        for observer in self._observers:
            with suppress(OSError):
                observer.close()
        self._observers = []


class EventLog:
    """Appends events to a file, each with one write, so that a killed process can tear only the last line."""

    def __init__(self, path: Path, kinds: Sequence[str] | None = None) -> None:
        """`kinds`: keep only these; all, if not given."""
        self._kinds = kinds
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._file).st_size
        self._torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"

    def observe(self, event: Event) -> None:
        """Writes the line at once. After a torn one it starts on a new line."""
        if self._kinds is not None and event["kind"] not in self._kinds:
            return
        line = (b"\n" if self._torn else b"") + strict_json(event).encode() + b"\n"
        self._torn = True
        written = os.write(self._file, line)
        if written < len(line):
            raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes fitted into {self._path}")
        self._torn = False

    def close(self) -> None:
        os.close(self._file)


def strict_json(event: Event) -> str:
    """One line of JSON that every reader accepts: NaN and the infinities become null."""
    return json.dumps(_finite(event), ensure_ascii=False, allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in cast("Mapping[object, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in cast("Sequence[object]", value)]
    return value


def read_events(path: Path) -> list[dict[str, object]]:
    """The events that are part of the run, in file order. Of a step that was done twice the highest attempt
    counts; what an earlier attempt did beyond the step from which a later one went on does not.
    """
    if not path.is_file():
        return []
    with path.open("rb") as lines:
        events = list(_parse(lines))
    last_steps = _last_steps(events)

    def counts(event: dict[str, object]) -> bool:
        return _number(event, "step") <= last_steps.get(_number(event, "attempt"), math.inf)

    newest: dict[tuple[object, int], int] = {}  # attempt that did this
    for event in filter(counts, events):
        key = event["kind"], _number(event, "step")
        newest[key] = max(newest.get(key, 0), _number(event, "attempt"))
    return [
        event
        for event in events
        if event["kind"] not in REPEATABLE
        or (counts(event) and newest[event["kind"], _number(event, "step")] == _number(event, "attempt"))
    ]


def _last_steps(events: Iterable[Event]) -> dict[int, float]:
    """By attempt, the last of its steps that is part of the run. The newest attempt counts, the one whose
    checkpoint it began with, and so on back to the first; any other only as far as it shares its steps with
    these. Of a log that names no beginnings every attempt counts.
    """
    first: dict[int, int] = {}  # step at which an attempt began
    parents: dict[int, int] = {}  # attempt whose checkpoint it began with
    savers: dict[int, int] = {}  # attempt that saved a step, so far
    for event in events:
        attempt, step = _number(event, "attempt"), _number(event, "step")
        if event["kind"] in BEGINNINGS:
            guess = savers.get(step, attempt - 1) if event["kind"] == "resume" else 0  # for logs without `of`
            first[attempt], parents[attempt] = step, _number(event, "of") if "of" in event else guess
        elif event["kind"] == "step" and attempt not in first:  # its beginning was torn
            first[attempt], parents[attempt] = step - 1, attempt - 1
        elif event["kind"] == "checkpoint":
            savers[step] = attempt
    last: dict[int, float] = {}
    attempt, until = max(first, default=0), math.inf
    while attempt in first and attempt not in last:
        last[attempt], until, attempt = until, min(until, first[attempt]), parents[attempt]
    for other in sorted(first.keys() - last.keys()):
        last[other] = min(first[other], last.get(parents[other], -1))
    return last


def last_attempt(path: Path) -> int:
    """The number of the newest attempt in a log, 0 if there is none. Reads only the end of the file."""
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return max((_number(event, "attempt") for event in _parse(file)), default=0)


@dataclass(frozen=True, slots=True)
class Past:
    """The earlier attempts of a run together."""

    failures: int = 0  # attempts that ended without a `stop`
    seconds: float = 0.0


def read_past(path: Path) -> Past:
    if not path.is_file():
        return Past()
    spans: dict[int, tuple[float, float]] = {}
    ended: set[int] = set()
    with path.open("rb") as lines:
        for event in _parse(lines):
            attempt, when = _number(event, "attempt"), event.get("time")
            if isinstance(when, float):
                first, _ = spans.get(attempt, (when, when))
                spans[attempt] = (first, when)
            if event["kind"] == "stop":
                ended.add(attempt)
    return Past(len(spans.keys() - ended), sum(max(0.0, last - first) for first, last in spans.values()))


def _parse(lines: Iterable[bytes]) -> Iterator[dict[str, object]]:
    """Every whole event; a line that a killed process tore is passed over."""
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "kind" in event:
            yield cast("dict[str, object]", event)


def _number(event: Event, name: str) -> int:
    value = event.get(name)
    return value if isinstance(value, int) else 0
