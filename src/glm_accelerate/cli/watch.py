"""`watch RUN [RUN ...]`: runs as a page in a browser, live and after their end, or as one file (`--html`)."""

import argparse
import sys
from pathlib import Path

from glm_accelerate.cli import options
from glm_accelerate.runtime.errors import ExitCode, UserError

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
        "--html", type=Path, metavar="FILE", help="write the page as it is now into one file, and end"
    )


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C, or write the file."""
    from glm_accelerate.watch.file import page_of
    from glm_accelerate.watch.run import WatchedRun
    from glm_accelerate.watch.server import PageServer

    directories = [Path(name) for name in args.runs]
    for directory in directories:
        if not directory.is_dir():
            raise UserError("there is no such run", where=directory)
    runs = [WatchedRun(each, each.resolve().name) for each in directories]
    if args.html is not None:
        args.html.write_text(page_of(runs), encoding="utf-8")
        return ExitCode.DONE
    try:
        server = PageServer(runs, args.port)
    except (OSError, OverflowError) as error:
        raise UserError(f"port {args.port} cannot be used: {error}", cure="leave --port out") from error
    sys.stdout.write(
        f"{server.address}\n"
        f"Ctrl-C ends it. From another machine: ssh -L {server.port}:127.0.0.1:{server.port} HERE\n"
    )
    sys.stdout.flush()
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return ExitCode.DONE
    return ExitCode.DONE
