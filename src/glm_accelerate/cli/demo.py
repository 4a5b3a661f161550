"""`demo`: from nothing to correct answers in about two minutes."""

import argparse
from itertools import count
from pathlib import Path

from glm_accelerate.cli import options
from glm_accelerate.runtime.errors import UserError

HELP = "Train a tiny GLM on generated data in about two minutes, from nothing to correct answers."


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run",
        type=options.directory,
        metavar="DIR",
        help="a new directory (runs/demo, or the next that is free)",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="train shorter or longer than usual")


def run(args: argparse.Namespace) -> int:
    """0 if the lessons were learnt, 1 if not."""
    if args.steps is not None and args.steps < 2:
        raise UserError(f"--steps is {args.steps}: expected 2 or more, as the demo is interrupted half-way")
    directory = new_directory(args.run)

    from rich.console import Console

    from glm_accelerate.demo.show import STEPS, show

    return 0 if show(directory, args.steps or STEPS, Console()) else 1


def new_directory(given: Path | None) -> Path:
    """Never one with something in it: a second demo must not touch what the first one wrote."""
    if given is None:
        names = ("runs/demo" if number == 1 else f"runs/demo-{number}" for number in count(1))
        return next(path for path in map(Path, names) if not _taken(path))
    if _taken(given):
        raise UserError("there is something already", where=given, cure="--run with a new directory")
    return given


def _taken(path: Path) -> bool:
    return path.exists() and not (path.is_dir() and not any(path.iterdir()))
