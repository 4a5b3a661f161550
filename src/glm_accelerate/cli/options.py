"""Arguments that several verbs have: CONFIG (a file, a preset, or other tools' files), PATH, --base,
--device, and the types of numbers and directories.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.words import read_rate

if TYPE_CHECKING:
    import torch

    from glm_accelerate.config.schema import RunConfig
    from glm_accelerate.config.trainer import Note

NEEDED = (
    "a config is needed: CONFIG, preset:NAME, --stock-config YAML DATA_DIR MODEL_DIR, or "
    "--llamafactory-config YAML"
)


def config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="a YAML file, or preset:NAME")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="values that replace what the config says"
    )
    parser.add_argument(
        "--stock-config",
        nargs=3,
        metavar=("YAML", "DATA_DIR", "MODEL_DIR"),
        help="a YAML file of the stock fine-tuning scripts in place of CONFIG",
    )
    parser.add_argument(
        "--llamafactory-config",
        metavar="YAML",
        help="a YAML file of LLaMA-Factory, with its dataset_info.json, in place of CONFIG",
    )
    parser.add_argument(
        "--stock-ranks",
        type=int,
        default=1,
        metavar="N",
        help="how many devices the run of that file had: its step is so many times larger (1)",
    )


def has_config(args: argparse.Namespace) -> bool:
    """Whether the user named a config at all."""
    return bool(_words(args) or args.stock_config or args.llamafactory_config)


def config_from(args: argparse.Namespace) -> "RunConfig":
    """The config that the arguments name. Of a stock file it shows what became of each key."""
    from glm_accelerate.config.load import load_config, override

    words = _words(args)
    if not (args.stock_config or args.llamafactory_config):
        if not words or _is_override(words[0]):
            raise UserError(NEEDED)
        return load_config(words[0], words[1:])
    from glm_accelerate.config.llamafactory import load_llamafactory
    from glm_accelerate.config.stock import load_stock

    option = "--stock-config" if args.stock_config else "--llamafactory-config"
    if args.stock_ranks < 1:
        raise UserError(f"--stock-ranks is {args.stock_ranks}, expected 1 or more")
    if words and not _is_override(words[0]):
        raise UserError(f"`{words[0]}`: CONFIG and {option} exclude each other")
    if args.stock_config and args.llamafactory_config:
        raise UserError("--stock-config and --llamafactory-config exclude each other")
    if args.stock_config:
        yaml, data, model = args.stock_config
        reading = load_stock(yaml, data, model, args.stock_ranks)
    else:
        yaml = args.llamafactory_config
        reading = load_llamafactory(yaml, args.stock_ranks)
    _show_notes(yaml, reading.notes)
    return override(reading.config, words)


def config_name(args: argparse.Namespace) -> str:
    """The config's name: what `runs/NAME` is called after."""
    if not has_config(args):
        raise UserError(NEEDED)
    source: str = args.stock_config[0] if args.stock_config else args.llamafactory_config or args.config
    return source.removeprefix("preset:") if source.startswith("preset:") else PurePath(source).stem


def path_arguments(parser: argparse.ArgumentParser) -> None:
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


def number(*, above_zero: bool = False) -> Callable[[str], float]:
    """The type of an argument that is a finite number from 0 on, or above it."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and (value > 0 if above_zero else value >= 0)):
            wanted = "above 0" if above_zero else "from 0 on"
            raise argparse.ArgumentTypeError(f"{text} is not a finite number {wanted}")
        return value

    return read


def rate(text: str) -> float:
    """The type of an argument that is the rate of a link; bytes a second."""
    found = read_rate(text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text} is not a rate as 100Gbit")
    return found


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


def _words(args: argparse.Namespace) -> list[str]:
    """With --stock-config the first override fills the place of CONFIG."""
    return [*([args.config] if args.config else []), *args.overrides]


def _is_override(word: str) -> bool:
    name, equals, _ = word.partition("=")
    return bool(equals) and "." in name and "/" not in name


def _show_notes(source: str, notes: "tuple[Note, ...]") -> None:
    """On stderr, as stdout is the verb's own. Keys from which nothing follows come last, by their reason."""
    from glm_accelerate.runtime.screen import new_console, say

    console = new_console(stderr=True)
    say(console, f"{source}, as it is read here", style="bold")
    silent: dict[str, list[str]] = {}
    for note in notes:
        name = note.key.split(".")[-1]
        if note.ours:
            say(console, f"  {name} -> {note.ours}", (f"  {note.why}" if note.why else "", "dim"))
        else:
            silent.setdefault(note.why, []).append(name)
    for why, names in silent.items():
        say(console, f"  {', '.join(names)}: {why}", style="dim")
