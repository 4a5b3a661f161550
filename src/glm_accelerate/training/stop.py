"""Stopping on Ctrl-C, SIGTERM, SIGHUP and SIGUSR1. While training, the step in hand ends and everything is
saved; before, there is nothing to save and the end comes at once. Either way the process exits with 75.
"""

import atexit
import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from glm_accelerate.runtime.errors import STOPPED_AT_ONCE, ExitCode, stop_signals

MOMENT = 5.0  # seconds for a process that ends at once


@contextmanager
def stopping_at_once() -> Generator[None, None, None]:
    """While entered, they raise KeyboardInterrupt. Where that is lost (in a callback of Python's own)
    or something waits for a thread (as a download does), the process ends a moment later all the same.
    """
    asked = threading.Event()

    def leave() -> None:
        os.write(2, f"{STOPPED_AT_ONCE}\n".encode())
        os._exit(ExitCode.STOPPED)

    def stop(number: int, frame: FrameType | None) -> None:
        timer = threading.Timer(MOMENT, leave)
        timer.daemon = True
        timer.start()
        asked.set()
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in stop_signals()}
    try:
        yield
    except Exception as error:
        if asked.is_set():  # functions written in C make other errors of it
            raise KeyboardInterrupt from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
            atexit.register(signal.signal, number, signal.SIG_IGN)  # all is done: the answer is to get out


class StopRequest:
    """While entered, a signal is remembered instead of killing. A second Ctrl-C interrupts at once."""

    def __init__(self, after: int | None = None) -> None:
        self._reason: str | None = None
        self._after = after  # a step after which to stop of one's own accord
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in stop_signals():
            self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def asked(self) -> bool:
        """Whether a signal has come."""
        return self._reason is not None

    def reason(self, step: int) -> str | None:
        """Why to stop after this step, if at all."""
        if self._reason is None and step == self._after:
            return f"asked to stop after step {step}"
        return self._reason

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._reason is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._reason is None:  # the launcher answers a Ctrl-C, which ranks hear too, by SIGTERM
            self._reason = signal.Signals(number).name
