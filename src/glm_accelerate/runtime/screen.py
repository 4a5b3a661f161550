"""Lines for people. On a terminal they break between words; files and pipes get every line whole."""

from rich.console import Console
from rich.table import Table
from rich.text import Text


def new_console(*, stderr: bool = False) -> Console:
    console = Console(stderr=stderr, highlight=False)
    console.soft_wrap = not console.is_terminal
    return console


def say(console: Console, *parts: str | tuple[str, str], style: str = "") -> None:
    """One line of texts, or of texts with their styles. Nothing in them is read as markup."""
    text = Text.assemble(*parts, style=style)
    console.print(text, highlight=False, soft_wrap=not console.is_terminal)


def new_table(*columns: str, right: int = 0) -> Table:
    """A table without lines, of which so many columns on the left are aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if number < right else "left", overflow="fold")
    return table
