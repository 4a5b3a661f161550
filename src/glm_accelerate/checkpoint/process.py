"""The trainer's end of the writer process: start it, tell it, hear it and never wait longer than asked."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from typing import Any

from glm_accelerate.checkpoint.staging import Staging
from glm_accelerate.runtime.child import how_ended, python_command

LAST_WORDS = 5.0  # seconds for a process that is told to end


class WriterEnded(Exception):
    """The writer process is no more."""


class WriterProcess:
    """A running writer that sees a copy's memory."""

    def __init__(self, staging: Staging) -> None:
        words, data = staging.words, staging.data
        command = python_command("from glm_accelerate.checkpoint.writer import main; main()")
        self._process = subprocess.Popen(
            [*command, str(words), str(data)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(words, data),
            start_new_session=True,
            bufsize=0,
        )
        self._heard = b""

    def go(self) -> None:
        """Write what the staging says."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has just died: `answer` tells how
            self._process.stdin.write(b"\n")

    def answer(self, seconds: float) -> dict[str, Any] | None:
        """What it says next; None if it says nothing for so long."""
        assert self._process.stdout is not None
        ends = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._heard:
                if not selector.select(max(0.0, ends - time.monotonic())):
                    return None
                heard = os.read(self._process.stdout.fileno(), 1 << 16)
                if not heard:
                    raise WriterEnded(self._how())
                self._heard += heard
        line, _, self._heard = self._heard.partition(b"\n")
        return json.loads(line)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """Let it go. It has nothing to do, or is not to be waited for any longer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(LAST_WORDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process.stdout.close()

    def kill(self) -> None:
        """End it wherever it is, stopped or hung."""
        self._process.kill()
        self._process.wait()

    def _how(self) -> str:
        try:
            code = self._process.wait(LAST_WORDS)
        except subprocess.TimeoutExpired:  # it lives, but nothing more will be heard of it
            self.kill()
            code = -signal.SIGKILL
        return how_ended(code)
