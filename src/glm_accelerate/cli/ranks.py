"""`train --nproc N`: the same verb in N processes under the launcher. Only the first one of them prints."""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from glm_accelerate.checkpoint.find import published
from glm_accelerate.checkpoint.format import step_of
from glm_accelerate.cli import main
from glm_accelerate.parallel.launch import LIBRARIES, launch
from glm_accelerate.parallel.ranks import FirstFailed, peer_ended
from glm_accelerate.runtime.env import launched
from glm_accelerate.runtime.errors import ExitCode, UserError


@dataclass(frozen=True, slots=True)
class RankTask:
    """What each process does: a verb, and what was typed behind it."""

    verb: Callable[[argparse.Namespace], int]
    args: argparse.Namespace


def start_ranks(task: RankTask, ranks: int, run: Path) -> int:
    """The exit code of all of them together."""

    def saved() -> int:
        newest = next(iter(published(run)), None)
        return 0 if newest is None else step_of(newest.name) or 0

    return launch(one_rank, task, ranks, saved, ExitCode.USERS_INPUT, load)


def load() -> None:
    """What a rank would spend most of its first seconds on."""
    for name in ("glm_accelerate.training.run", *LIBRARIES):
        import_module(name)


def one_rank(task: RankTask) -> int:
    """In a process of its own. What goes wrong has to end it, or the others would wait for it for ever; only
    where another rank says what it is, that one's exit code counts.
    """
    said = launched()
    rank = said.rank if said is not None else 0
    if rank:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    reported = False

    def act() -> int:
        nonlocal reported
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the launcher blocked it
            return task.verb(task.args)
        except KeyboardInterrupt:  # before training began; the launcher says it once for all ranks
            sys.exit(128 + signal.SIGINT)
        except UserError as error:
            reported = error.reported
            raise
        except FirstFailed:
            reported = True
            return ExitCode.OUR_BUG
        except RuntimeError as error:
            if not peer_ended(error):
                raise
            sys.stderr.write(f"rank {rank}: ended because another rank did\n")
            reported = True
            return ExitCode.OUR_BUG

    code = main.answer(act)
    return ExitCode.AFTER_ANOTHER if reported else code
