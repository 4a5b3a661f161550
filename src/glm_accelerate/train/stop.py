"""Stopping on Ctrl-C and SIGTERM: the step in hand ends, everything is saved, the process exits with 75."""

import signal
from types import FrameType, TracebackType
from typing import Any


class StopRequest:
    """While entered, a signal is remembered instead of killing. A second Ctrl-C interrupts at once."""

    def __init__(self, after: int | None = None) -> None:
        self._reason: str | None = None
        self._after = after  # a step after which to stop of one's own accord
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def reason(self, step: int) -> str | None:
        """Why to stop after this step, if at all."""
        if self._reason is None and step == self._after:
            return f"asked to stop after step {step}"
        return self._reason

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._reason is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._reason = signal.Signals(number).name
