"""`train CONFIG`: train, or go on where the run stopped; with `--nproc N` in N processes on this machine."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from glm_accelerate.cli import opening, source
from glm_accelerate.runtime.env import launched
from glm_accelerate.runtime.errors import STOPPED_AT_ONCE, ExitCode, UserError
from glm_accelerate.training.mismatch import EVERY
from glm_accelerate.training.stop import stopping_at_once

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

HELP = "Train as a config says. Run the same command again to go on where it stopped."


def arguments(parser: argparse.ArgumentParser) -> None:
    """CONFIG, where to run, and where to begin."""
    source.arguments(parser)
    parser.add_argument(
        "--run",
        type=opening.directory,
        metavar="DIR",
        help="the run's directory (runs/<the config's name>)",
    )
    parser.add_argument(
        "--nproc", type=int, default=1, metavar="N", help="processes on this machine, one a device (1)"
    )
    parser.add_argument(
        "--resume", default="auto", metavar="auto|never|STEP|PATH", help="where to go on (auto)"
    )
    parser.add_argument(
        "--init-from",
        type=opening.directory,
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
            *(name for said in args.accept for name in said.split(",")),
            *(word for word in args.overrides if word in EVERY),
        ]
        args.overrides = [word for word in args.overrides if word not in EVERY]
    strange = set(args.accept) - EVERY
    if strange:
        raise UserError(f"--accept {strange.pop()}: no such thing", cure=f"one of {', '.join(sorted(EVERY))}")
    config = source.config_from(args)  # its mistakes are shown before torch is loaded
    directory = args.run or Path("runs") / source.name_from(args)
    if args.nproc > 1:
        from glm_accelerate.cli.ranks import RankTask, start_ranks

        ranks, args.run, args.nproc = args.nproc, directory, 1
        return start_ranks(RankTask(run, args), ranks, directory)

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
        with watching(Console(stderr=True)) as watch:
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
        _show([(change.key, change.then, change.now, change.flag) for change in error.changes], console)
        raise
    except Mismatched as error:
        rows = [(one.name, one.then, one.now, one.flag or one.consequence) for one in error.mismatches]
        _show(rows, console)
        raise
    if result.done:
        return 0
    console.print("run the same command again to go on")
    return ExitCode.STOPPED


def _show(rows: "Sequence[tuple[object, ...]]", console: "Console") -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("what", "then", "now", "to go on", box=None)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console.print(table)
