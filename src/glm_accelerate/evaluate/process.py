"""The evaluator as a process, by hand (`python -m glm_accelerate.evaluate.process RUN`) or a trainer's child.

Training goes first: it is nice, keeps to its threads and cores, and ends when its parent does. To the parent
it says `ready`, `claimed STEM`, `done STEM` and never waits for being heard; it is told `threads N`.
"""

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from pathlib import Path
from types import FrameType

import torch

from glm_accelerate.evaluate.protocol.evaluator import Following, all_count, follow
from glm_accelerate.evaluate.protocol.messages import Examiner
from glm_accelerate.parallel.ranks import ALONE, Ranks, joined
from glm_accelerate.runtime.device import take_device
from glm_accelerate.runtime.errors import ExitCode, UserError
from glm_accelerate.runtime.host import keep_freed_memory
from glm_accelerate.runtime.orphan import end_with_parent
from glm_accelerate.runtime.stopped import stop_signals
from glm_accelerate.runtime.streams import outlive_readers

NICENESS = 10


class Parent:
    """The trainer, as its child sees it: two pipes. Their end is ours."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._words = os.dup(1)
        os.dup2(2, 1)  # whatever prints goes to the log
        os.set_blocking(self._words, False)
        threading.Thread(target=self._listen, daemon=True).start()

    def tell(self, line: str) -> None:
        """A parent that does not listen misses it."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._words, f"{line}\n".encode())

    def share(self) -> None:
        """As many threads as it has granted last."""
        torch.set_num_threads(self._threads)

    def _listen(self) -> None:
        for line in sys.stdin:
            word, _, number = line.strip().partition(" ")
            if word == "threads" and number.isascii() and number.isdigit():
                self._threads = max(1, int(number))
        os._exit(0)


def main(words: Sequence[str] | None = None) -> int:
    """The exit code: 0 when the run is finished, 2 for what the user can mend, 75 after a signal."""
    parser = argparse.ArgumentParser(prog="python -m glm_accelerate.evaluate.process")
    parser.add_argument("run", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cores", default="", help="to keep to, as 2,3; all, if not given")
    parser.add_argument("--build", default="", help="module:function that makes an Examiner from RUN")
    parser.add_argument("--once", action="store_true", help="what waits now, no more")
    parser.add_argument("--oldest", action="store_true", help="first; else as the run's config says")
    parser.add_argument("--child", action="store_true", help="of a trainer that listens")
    parser.add_argument("--trust", action="store_true", help="execute what metrics the run's config names")
    args = parser.parse_args(words)
    outlive_readers()
    for number in stop_signals():
        signal.signal(number, _stop)
    try:
        if not args.child:  # its parent has seen to that
            be_nice(_cores(args.cores))
        _serve(args)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return ExitCode.USERS_INPUT
    except KeyboardInterrupt:  # what was claimed is free again
        return ExitCode.STOPPED
    return 0


def examiner_of(build: str, run: Path) -> Examiner:
    """What a user's own `module:function` makes."""
    module, _, function = build.partition(":")
    try:
        make: Callable[[str], Examiner] = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"cannot be found: {error}", where=build, cure="--build MODULE:FUNCTION") from error
    return make(str(run))


def _of_run(run: Path, device: str, ranks: Ranks, trusted: bool) -> Examiner:
    # All of a GLM: an examiner of one's own has none.
    from glm_accelerate.evaluate.measuring.metrics import require_trust
    from glm_accelerate.evaluate.measuring.rebuild import glm_examiner, said_of

    if not trusted:
        require_trust(run / "config.yaml", said_of(run)[0].evaluate.metrics)
    return glm_examiner(run, device, ranks)


def be_nice(cores: Collection[int]) -> None:
    """Training goes first."""
    os.nice(NICENESS)
    if cores:
        os.sched_setaffinity(0, cores)


def _cores(said: str) -> set[int]:
    try:
        return {int(core) for core in said.split(",")} if said else set()
    except ValueError as error:
        raise UserError(f"not a list of cores: {said}", cure="--cores 2,3") from error


def _serve(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    take_device(args.device)
    keep_freed_memory()
    parent = Parent(args.threads) if args.child else None
    if parent is not None:
        end_with_parent()
    # A trainer's child has its environment: it must not take part in the trainer's job.
    with contextlib.nullcontext(ALONE) if args.child else joined() as ranks:
        run: Path = args.run
        trusted = args.trust or args.child  # a trainer has been told by its user
        made = examiner_of(args.build, run) if args.build else _of_run(run, args.device, ranks, trusted)
        how = Following(args.once, args.oldest or (parent is None and all_count(run)), refuses=parent is None)
        if parent is not None:
            parent.tell("ready")
            how = Following(args.once, args.oldest, tell=parent.tell, before=parent.share)
        follow(run, made, how, ranks)


def _stop(number: int, frame: FrameType | None) -> None:
    """The second time at once."""
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
