"""The evaluator as a trainer's child (`protocol/child.py` starts it): it ends when the trainer does.

It writes `ready`, `claimed STEM`, `done STEM` without waiting for the trainer, and reads `threads N`.
"""

import contextlib
import os
import signal
import sys
import threading
from importlib import import_module
from pathlib import Path
from types import FrameType

import torch

from glm_accelerate.evaluate.protocol.evaluator import FollowOptions, follow
from glm_accelerate.evaluate.protocol.messages import Examiner
from glm_accelerate.runtime.child import end_with_parent
from glm_accelerate.runtime.device import take_device
from glm_accelerate.runtime.errors import ExitCode, UserError, stop_signals
from glm_accelerate.runtime.host import keep_freed_memory
from glm_accelerate.runtime.streams import outlive_readers


class Trainer:
    """The parent process as its child sees it: two pipes. When they close, this process ends."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pipe = os.dup(1)
        os.dup2(2, 1)  # whatever prints goes to the log
        os.set_blocking(self._pipe, False)
        threading.Thread(target=self._receive, daemon=True).start()

    def send(self, line: str) -> None:
        """Lost if the trainer does not read."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._pipe, f"{line}\n".encode())

    def use_threads(self) -> None:
        """Compute with as many threads as it has granted last."""
        torch.set_num_threads(self._threads)

    def _receive(self) -> None:
        for line in sys.stdin:
            word, _, number = line.strip().partition(" ")
            if word == "threads" and number.isascii() and number.isdigit():
                self._threads = max(1, int(number))
        os._exit(0)


def serve(run: str, device: str, oldest: bool, build: str, threads: int) -> int:
    """Evaluate a run's requests. The exit code: 0 when it is finished, 2 for what the user can mend, 75 after
    a signal. `oldest`: the oldest request first; `build`: module:function of the user's own examiner.
    """
    outlive_readers()
    for number in stop_signals():
        signal.signal(number, _stop)
    try:
        torch.set_num_threads(threads)
        take_device(device)
        keep_freed_memory()
        trainer = Trainer(threads)
        end_with_parent()
        if build:
            examiner = build_examiner(build, run)
        else:
            from glm_accelerate.evaluate.measuring.rebuild import glm_examiner  # an own one needs no GLM

            examiner = glm_examiner(Path(run), device)
        trainer.send("ready")
        options = FollowOptions(oldest=oldest, on_message=trainer.send, before_each=trainer.use_threads)
        follow(Path(run), examiner, options)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return ExitCode.USERS_INPUT
    except KeyboardInterrupt:  # what was claimed is free again
        return ExitCode.STOPPED
    return ExitCode.DONE


def build_examiner(build: str, run: str) -> Examiner:
    """Call the user's own `module:function`."""
    module, _, function = build.partition(":")
    try:
        make = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"cannot be found: {error}", where=build, cure="--build MODULE:FUNCTION") from error
    return make(run)


def _stop(number: int, frame: FrameType | None) -> None:
    """The second time at once."""
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt
