"""`train CONFIG`: train, or go on where the run stopped."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from glm_accelerate.cli import source

if TYPE_CHECKING:
    from rich.console import Console

    from glm_accelerate.train.directory import Change

HELP = "Train as a config says. Run the same command again to go on where it stopped."
STOPPED = 75


def arguments(parser: argparse.ArgumentParser) -> None:
    """CONFIG, where to run, and where to begin."""
    source.arguments(parser)
    parser.add_argument(
        "--run", type=Path, metavar="DIR", help="the run's directory (runs/<the config's name>)"
    )
    parser.add_argument(
        "--resume", default="auto", metavar="auto|never|STEP|PATH", help="where to go on (auto)"
    )
    parser.add_argument(
        "--init-from", type=Path, metavar="PATH", help="an adapter, a model or a checkpoint to begin with"
    )
    parser.add_argument(
        "--accept-changes", action="store_true", help="go on although the run's config has changed"
    )


def run(args: argparse.Namespace) -> int:
    """Train; 0 when done, 75 when stopped by a signal with everything saved."""
    config = source.config_from(args)  # its mistakes are shown before torch is loaded
    directory = args.run or Path("runs") / source.name_from(args)

    from rich.console import Console

    from glm_accelerate.cli.progress import watching
    from glm_accelerate.observe.console import ConsoleObserver, show_start
    from glm_accelerate.train.build import Start
    from glm_accelerate.train.directory import ConfigChanged
    from glm_accelerate.train.run import train

    console = Console()
    start = Start(args.resume, args.init_from, args.accept_changes)
    try:
        with watching(Console(stderr=True)) as watch:
            result = train(
                config,
                directory,
                start=start,
                observers=[ConsoleObserver(console)],
                on_read=watch,
                on_built=lambda ready: show_start(ready.run.plan, ready.proofs, ready.resumed, console),
            )
    except ConfigChanged as error:
        _show_changes(error.changes, console)
        raise
    if result.done:
        return 0
    console.print(f"stopped by {result.reason} after step {result.step}; run the same command again to go on")
    return STOPPED


def _show_changes(changes: "list[Change]", console: "Console") -> None:
    from rich.table import Table

    table = Table("key", "then", "now", box=None)
    for key, then, now in changes:
        table.add_row(key, str(then), str(now))
    console.print(table)
