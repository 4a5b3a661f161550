"""What verbs that open a model have in common: PATH, --base, and words that are checked before it is read."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from glm_accelerate.runtime.errors import UserError

if TYPE_CHECKING:
    import torch

    from glm_accelerate.assemble.model import Opened


def arguments(parser: argparse.ArgumentParser) -> None:
    """PATH, and the base model where PATH is an adapter."""
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


def amount(*, least: float = 0.0, above: bool = False) -> Callable[[str], float]:
    """The type of an argument that is a finite number from `least` on, or only above it."""

    def read(text: str) -> float:
        number = _number(text)
        if not math.isfinite(number) or number < least or (above and number == least):
            wanted = f"above {least:g}" if above else f"from {least:g} on"
            raise argparse.ArgumentTypeError(f"{text} is not a finite number {wanted}")
        return number

    return read


def directory(text: str) -> Path:
    """The type of an argument that names one: nothing is no name, as where a shell's variable is not set."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: a shell's variable that is not set?")
    return Path(text)


def base(parser: argparse.ArgumentParser) -> None:
    """For directories that don't say it themselves, or that were moved."""
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


def open_from(args: argparse.Namespace, path: Path) -> "Opened":
    """The model, merged, on the fastest device here."""
    from glm_accelerate.assemble.model import open_model
    from glm_accelerate.runtime.device import take_device

    return open_model(path, base=base_from(args), device=take_device(None), merged=True)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
