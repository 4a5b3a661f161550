"""`watch RUN [RUN ...]`: runs as a page in a browser, live and after their end, or as one file (`--html`), as
lines of a terminal (`--tail`), as figures for Prometheus (`--metrics`, or /metrics of the page's address).
"""

import argparse
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from glm_accelerate.cli import options
from glm_accelerate.runtime.errors import ExitCode, UserError

if TYPE_CHECKING:
    from glm_accelerate.watch.run import WatchedRun

TOKEN = re.compile(r"[\w-]{32}", re.ASCII)
HELP = (
    "Show runs as a page in a browser: losses, speed, memory, evaluations and decisions, live and afterwards."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run directories, whose curves share the charts"
    )
    parser.add_argument(
        "--port", type=options.at_least(0), default=0, metavar="N", help="on this machine (a free one)"
    )
    parser.add_argument(
        "--token",
        type=Path,
        metavar="FILE",
        help="keep the address's token in this file, so that it is the same next time",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--html", type=Path, metavar="FILE", help="write the page as it is now into one file, and end"
    )
    instead.add_argument("--tail", action="store_true", help="show one run in this terminal until it ends")
    instead.add_argument(
        "--metrics", action="store_true", help="print the newest figures as Prometheus reads them, and end"
    )


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C, or do what was asked instead."""
    from glm_accelerate.watch.file import page_of
    from glm_accelerate.watch.metrics import Metrics

    runs = _runs([Path(name) for name in args.runs])
    if args.html is not None:
        args.html.write_text(page_of(runs), encoding="utf-8")
    elif args.metrics:
        sys.stdout.write(Metrics(runs).text())
    elif args.tail:
        _tail(runs)
    else:
        _serve(runs, args.port, args.token)
    return ExitCode.DONE


def _runs(directories: "list[Path]") -> "list[WatchedRun]":
    """Each under the name of its directory, or the whole path where two have one name."""
    from glm_accelerate.watch.run import WatchedRun

    for directory in directories:
        if not directory.is_dir():
            raise UserError("there is no such run", where=directory)
    whole = list(dict.fromkeys(directory.resolve() for directory in directories))
    names = [each.name for each in whole]
    return [WatchedRun(each, each.name if names.count(each.name) == 1 else str(each)) for each in whole]


def _tail(runs: "list[WatchedRun]") -> None:
    from glm_accelerate.runtime.screen import new_console
    from glm_accelerate.watch.tail import tail

    if len(runs) > 1:
        raise UserError("--tail shows one run", cure="the page shows several: leave --tail out")
    with suppress(KeyboardInterrupt):
        tail(runs[0], new_console())


def _serve(runs: "list[WatchedRun]", port: int, kept: Path | None) -> None:
    from glm_accelerate.watch.server import PageServer

    try:
        server = PageServer(runs, port, "" if kept is None else kept_token(kept))
    except (OSError, OverflowError) as error:
        raise UserError(f"port {port} cannot be used: {error}", cure="leave --port out") from error
    sys.stdout.write(
        f"{server.address}\n"
        f"Ctrl-C ends it. From another machine: ssh -L {server.port}:127.0.0.1:{server.port} HERE\n"
    )
    sys.stdout.flush()
    with server, suppress(KeyboardInterrupt):
        server.serve_forever()


def kept_token(file: Path) -> str:
    """The token in a file that its owner alone can read; a new one, if there is no file."""
    from glm_accelerate.runtime.files import write_synced
    from glm_accelerate.watch.server import new_token

    with suppress(FileExistsError):
        write_synced(file, new_token().encode())
    token = file.read_text(encoding="utf-8").strip()
    if not TOKEN.fullmatch(token) or file.stat().st_mode & 0o077:
        what = "holds no token of ours, or others can read it"
        raise UserError(what, where=file, cure="remove it: a new one is written")
    return token
