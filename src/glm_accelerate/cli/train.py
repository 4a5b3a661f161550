"""`train CONFIG`: train, or go on where the run stopped; with `--nproc N` in N processes on this machine, and
with `--nnodes` together with other machines. Only the first process prints.
"""

import argparse
import os
import signal
import sys
from importlib import import_module
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from glm_accelerate.cli import main, options
from glm_accelerate.runtime.env import given_rendezvous, launched
from glm_accelerate.runtime.errors import STOPPED_AT_ONCE, ExitCode, UserError
from glm_accelerate.training.mismatch import EVERY
from glm_accelerate.training.stop import stopping_at_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rich.console import Console

    from glm_accelerate.config.schema import RunConfig
    from glm_accelerate.parallel.seats import Several

HELP = "Train as a config says. Run the same command again to go on where it stopped."


def arguments(parser: argparse.ArgumentParser) -> None:
    options.config_arguments(parser)
    parser.add_argument(
        "--run",
        type=options.directory,
        metavar="DIR",
        help="the run's directory (runs/<the config's name>)",
    )
    parser.add_argument(
        "--nproc", type=int, default=1, metavar="N", help="processes on this machine, one a device (1)"
    )
    parser.add_argument(
        "--nnodes", metavar="N|MIN:MAX", help="machines on which this command is typed (1); as many as come"
    )
    parser.add_argument(
        "--rendezvous",
        metavar="HOST:PORT",
        help="where they meet: an address of one of them, the same on all (MASTER_ADDR:MASTER_PORT)",
    )
    parser.add_argument(
        "--resume", default="auto", metavar="auto|never|STEP|PATH", help="where to go on (auto)"
    )
    parser.add_argument(
        "--init-from",
        type=options.directory,
        metavar="PATH",
        help="an adapter, a model or a checkpoint to begin with",
    )
    parser.add_argument(
        "--accept",
        action="append",
        default=[],
        metavar="WHAT",
        help=f"go on although this has changed, one or several of {', '.join(sorted(EVERY))}",
    )
    parser.add_argument(
        "--accept-changes", action="store_true", help="go on whatever of the run's config has changed"
    )


def run(args: argparse.Namespace) -> int:
    """Train; 0 when done, 75 when stopped by a signal with everything saved."""
    if launched() is not None:  # SIGTERM kills a rank that starts, even in a call that Python can't interrupt
        return _train(args)
    try:
        with stopping_at_once():
            return _train(args)
    except KeyboardInterrupt:
        sys.stderr.write(f"{STOPPED_AT_ONCE}\n")
        return ExitCode.STOPPED


def _train(args: argparse.Namespace) -> int:
    if args.nproc < 1:
        raise UserError(f"--nproc is {args.nproc}, expected 1 or more")
    if args.accept:  # `--accept order schedule` and `--accept order,schedule` are meant so, too
        args.accept = [
            *(name for names in args.accept for name in names.split(",")),
            *(word for word in args.overrides if word in EVERY),
        ]
        args.overrides = [word for word in args.overrides if word not in EVERY]
    strange = set(args.accept) - EVERY
    if strange:
        raise UserError(f"--accept {strange.pop()}: no such thing", cure=f"one of {', '.join(sorted(EVERY))}")
    config = options.config_from(args)  # its mistakes are shown before torch is loaded
    directory = args.run or Path("runs") / options.config_name(args)
    several = _several(args, config)
    if args.nproc > 1 or several is not None:
        ranks, args.run, args.nproc = args.nproc, directory, 1
        args.nnodes = args.rendezvous = None
        return _start_ranks(args, ranks, several)

    from rich.console import Console

    from glm_accelerate.cli.progress import watching
    from glm_accelerate.evaluate.report.page import best_so_far
    from glm_accelerate.observe.console import ConsoleObserver, show_start
    from glm_accelerate.training.directory import ConfigChanged
    from glm_accelerate.training.mismatch import Mismatched
    from glm_accelerate.training.run import train
    from glm_accelerate.training.settle import Start

    console = Console()
    start = Start(args.resume, args.init_from, EVERY if args.accept_changes else frozenset(args.accept))
    try:
        with watching() as watch:
            result = train(
                config,
                directory,
                start=start,
                observers=[ConsoleObserver(console, best=lambda: best_so_far(directory))],
                on_read=watch,
                on_built=lambda ready: show_start(
                    ready.run.plan, ready.proofs, ready.resumed and ready.resumed.step, console
                ),
            )
    except ConfigChanged as error:
        _show_changes(((one.key, one.then, one.now, one.flag) for one in error.changes), console)
        raise
    except Mismatched as error:
        rows = ((one.name, one.then, one.now, one.flag or one.consequence) for one in error.mismatches)
        _show_changes(rows, console)
        raise
    if result.done:
        return 0
    console.print("run the same command again to go on")
    return ExitCode.STOPPED


def _show_changes(rows: "Iterable[tuple[object, ...]]", console: "Console") -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("what", "then", "now", "to go on", box=None)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console.print(table)


def _several(args: argparse.Namespace, config: "RunConfig") -> "Several | None":
    """How this machine takes part in a job of several; None if it is the only one."""
    if args.nnodes is None:
        if args.rendezvous is not None:
            raise UserError(
                "--rendezvous without --nnodes", cure="--nnodes 2, or as many machines as there are"
            )
        return None
    least, colon, most = str(args.nnodes).partition(":")
    if not (least.isdecimal() and (most.isdecimal() or not colon) and 1 <= int(least) <= int(most or least)):
        raise UserError(
            f"--nnodes is {args.nnodes!r}, expected N or MIN:MAX", cure="--nnodes 2 or --nnodes 2:4"
        )
    where = args.rendezvous or given_rendezvous()
    if where is None:
        raise UserError(
            "--nnodes needs a place where they meet", cure="--rendezvous HOST:PORT, the same on all"
        )
    from glm_accelerate.parallel.alike import facts_of
    from glm_accelerate.parallel.nodes import Terms
    from glm_accelerate.parallel.seats import Several
    from glm_accelerate.parallel.wire import Endpoint

    asked = config.parallel
    sizes = asked.shard, *map(asked.size, ("tensor", "pipeline", "context"))
    multiple = prod(size for size in sizes if isinstance(size, int))
    terms = Terms(int(least), int(most or least), multiple)
    return Several(Endpoint.of(where), terms, facts_of(config))


def _start_ranks(args: argparse.Namespace, ranks: int, several: "Several | None") -> int:
    """The exit code of all ranks together."""
    from glm_accelerate.checkpoint.find import published
    from glm_accelerate.checkpoint.format import step_of
    from glm_accelerate.parallel.launch import LIBRARIES, launch

    def saved() -> int:
        newest = next(iter(published(args.run)), None)
        return 0 if newest is None else step_of(newest.name) or 0

    def load() -> None:
        for name in ("glm_accelerate.training.run", *LIBRARIES):
            import_module(name)

    return launch(one_rank, args, ranks, saved, ExitCode.USERS_INPUT, load, several)


def one_rank(args: argparse.Namespace) -> int:
    """`train` in a process of its own."""
    return as_rank(lambda: run(args))


def as_rank(work: "Callable[[], int]") -> int:
    """Work of one rank, in a process of its own. Whatever goes wrong ends it, or the others would wait for
    ever; where another rank reports what it is, that rank's exit code counts.
    """
    from glm_accelerate.parallel.ranks import FirstFailed, peer_ended

    place = launched()
    rank = 0 if place is None else place.rank
    if rank:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    reported = False

    def act() -> int:
        nonlocal reported
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the launcher blocked it
            return work()
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

    code = main.exit_code(act)
    return ExitCode.AFTER_ANOTHER if reported else code
