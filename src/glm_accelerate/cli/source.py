"""What every verb that takes a config accepts: CONFIG, a preset, or the stock scripts' three arguments."""

import argparse
from pathlib import PurePath
from typing import TYPE_CHECKING

from glm_accelerate.runtime.errors import UserError

if TYPE_CHECKING:
    from glm_accelerate.config.schema import RunConfig
    from glm_accelerate.config.stock import Note

NEEDED = "a config is needed: CONFIG, preset:NAME, or --stock-config YAML DATA_DIR MODEL_DIR"


def arguments(parser: argparse.ArgumentParser) -> None:
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
        "--stock-ranks",
        type=int,
        default=1,
        metavar="N",
        help="how many devices the stock run had: its step is so many times larger (1)",
    )


def is_given(args: argparse.Namespace) -> bool:
    """Whether the user named a config at all."""
    return bool(_words(args)) or args.stock_config is not None


def config_from(args: argparse.Namespace) -> "RunConfig":
    """The config that the arguments name. Of a stock file it shows what became of each key."""
    from glm_accelerate.config.load import load_config, override

    words = _words(args)
    if args.stock_config is None:
        if not words or _is_override(words[0]):
            raise UserError(NEEDED)
        return load_config(words[0], words[1:])
    from glm_accelerate.config.stock import load_stock

    if args.stock_ranks < 1:
        raise UserError(f"--stock-ranks is {args.stock_ranks}, expected 1 or more")
    if words and not _is_override(words[0]):
        raise UserError(f"`{words[0]}`: CONFIG and --stock-config exclude each other")
    yaml, data, model = args.stock_config
    reading = load_stock(yaml, data, model, args.stock_ranks)
    _show_notes(yaml, reading.notes)
    return override(reading.config, words)


def name_from(args: argparse.Namespace) -> str:
    """The config's name: what `runs/NAME` is called after."""
    if not is_given(args):
        raise UserError(NEEDED)
    source: str = args.stock_config[0] if args.stock_config else args.config
    return source.removeprefix("preset:") if source.startswith("preset:") else PurePath(source).stem


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
