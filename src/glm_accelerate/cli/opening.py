"""Arguments that several verbs have: PATH, --base, --device, and the types of numbers and directories."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from glm_accelerate.runtime.errors import UserError

if TYPE_CHECKING:
    import torch


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        metavar="PATH",
        help="a run (its best weights), a checkpoint, a snapshot, an adapter, a model directory or a "
        "hub's name",
    )
    base(parser)


def at_least(least: int) -> Callable[[str], int]:
    """The type of an argument that is a whole number from `least` on."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number from {least} on")
        return int(text)

    return read


def from_zero(text: str) -> float:
    """The type of an argument that is a finite number from 0 on."""
    number = _number(text)
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a finite number from 0 on")
    return number


def above_zero(text: str) -> float:
    """The type of an argument that is a finite number above 0."""
    number = _number(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text} is not a finite number above 0")
    return number


def directory(text: str) -> Path:
    """The type of an argument that names a directory: an empty one is a shell's variable that is not set."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: a shell's variable that is not set?")
    return Path(text)


def base(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--base",
        metavar="DIR",
        help="the model that an adapter or a run was trained on, if it is not where that says",
    )


def base_from(args: argparse.Namespace) -> Path | None:
    """The base model as the user calls it: a directory, or a hub's name."""
    return Path(args.base) if args.base else None


def device_from(args: argparse.Namespace) -> "torch.device":
    """--device, or the fastest here, with --threads of the processor."""
    import torch

    from glm_accelerate.runtime.device import take_device

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    try:
        device = take_device(args.device or None)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"no such device here: {str(error).splitlines()[0]}", where=args.device) from error
    return device


def _number(text: str) -> float:
    """NaN for what is no finite number."""
    try:
        return float(text) if math.isfinite(float(text)) else math.nan
    except ValueError:
        return math.nan
