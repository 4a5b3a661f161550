"""The evaluator as a trainer's child (`protocol/child.py` starts it): it ends when the trainer does.

It writes `ready`, `claimed STEM`, `done STEM` without waiting for the trainer.
"""

import os
import signal
import sys
import threading
from contextlib import suppress
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


def serve(run: str, device: str, threads: int, oldest: bool, build: str) -> int:
    """Evaluate a run's requests. The exit code: 0 when it is finished, 2 for what the user can mend, 75 after
    a signal. `threads`: while several requests wait, else one; `oldest`: the oldest request first; `build`:
    module:function of the user's own examiner.
    """
    outlive_readers()
    for number in stop_signals():
        signal.signal(number, _stop)
    trainer = os.dup(1)
    os.dup2(2, 1)  # whatever prints goes to the log
    os.set_blocking(trainer, False)

    def tell(line: str) -> None:
        with suppress(BlockingIOError):  # lost if the trainer does not read
            os.write(trainer, f"{line}\n".encode())

    try:
        torch.set_num_threads(1)
        take_device(device)
        keep_freed_memory()
        threading.Thread(target=_end_with_input, daemon=True).start()
        end_with_parent()
        if build:
            examiner = build_examiner(build, run)
        else:
            from glm_accelerate.evaluate.measuring.rebuild import glm_examiner  # an own one needs no GLM

            examiner = glm_examiner(Path(run), device)
        tell("ready")
        follow(Path(run), examiner, FollowOptions(oldest=oldest, on_message=tell, backlog_threads=threads))
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


def _end_with_input() -> None:
    """The trainer writes nothing: its pipe closes when it ends."""
    sys.stdin.read()
    os._exit(0)


def _stop(number: int, frame: FrameType | None) -> None:
    """End in order; at a second signal at once."""
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt
