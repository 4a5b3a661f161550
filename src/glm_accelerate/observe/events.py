"""Events: what a run says while it goes. One strict JSON object a line; observers look on and never touch."""

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

Event = Mapping[str, object]
TAIL_BYTES = 1 << 16  # longer than any line that is written


class Observer(Protocol):
    """Anyone who looks on. May raise OSError (a full disk): it is then left out, and training goes on."""

    def observe(self, event: Event) -> None: ...
    def close(self) -> None: ...


class Events:
    """Stamps what happens and hands it to every observer."""

    def __init__(self, observers: Sequence[Observer], attempt: int) -> None:
        self._observers = list(observers)
        self.attempt = attempt

    def emit(self, kind: str, fields: Mapping[str, object]) -> None:
        """Tell everybody. `attempt` grows with each start of a run; the highest wins for equal steps."""
        event = {"time": round(time.time(), 3), "kind": kind, "attempt": self.attempt, **fields}
        for observer in list(self._observers):
            try:
                observer.observe(event)
            except OSError as error:
                self._observers.remove(observer)
                said = f"{type(observer).__name__} no longer looks on: {error}"
                self.emit("warning", {"said": said})

    def close(self) -> None:
        """Let every observer finish."""
        for observer in self._observers:
            observer.close()


class EventLog:
    """Appends events, of some kinds or all, to a file: one write a line, so that lines are never mixed."""

    def __init__(self, path: Path, kinds: Sequence[str] | None = None) -> None:
        self._kinds = kinds
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        if _torn(self._descriptor):  # the line that a killed process did not finish
            os.write(self._descriptor, b"\n")

    def observe(self, event: Event) -> None:
        if self._kinds is None or event["kind"] in self._kinds:
            text = json.dumps(finite(event), ensure_ascii=False, allow_nan=False)
            os.write(self._descriptor, text.encode("utf-8", "replace") + b"\n")

    def close(self) -> None:
        os.close(self._descriptor)


def finite(value: Any) -> Any:
    """The same with null in place of NaN and infinities: strict JSON has no words for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def read_events(path: Path) -> list[dict[str, Any]]:
    """Every whole line. Of steps that were run twice only the highest attempt's stay."""
    events = [event for line in _lines(path) if (event := _parse(line)) is not None]
    newest: dict[tuple[str, int], int] = {}
    for event in events:
        if "step" in event:
            key = (event["kind"], event["step"])
            newest[key] = max(newest.get(key, 0), event["attempt"])
    return [e for e in events if "step" not in e or newest[e["kind"], e["step"]] == e["attempt"]]


def last_attempt(path: Path) -> int:
    """The attempt of the newest line, 0 if there is none. Reads the end of the file only."""
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        tail = file.read().split(b"\n")
    attempts = [event["attempt"] for line in tail if (event := _parse(line)) is not None]
    return max(attempts, default=0)


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n") if path.is_file() else []


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "attempt" in event else None


def _torn(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
