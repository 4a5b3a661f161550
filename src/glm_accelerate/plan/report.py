"""A plan as a person reads it: every derived value, and why it is so."""

from collections.abc import Sequence
from typing import Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from glm_accelerate.plan.run_plan import Reason


class HasReasons(Protocol):
    """A plan, for all that a report has to know of it."""

    @property
    def reasons(self) -> Sequence[Reason]: ...


def show_plan(plan: HasReasons, console: Console) -> None:
    """Print the table. Names and values come from files, so nothing in them is read as markup."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("what", no_wrap=True)
    table.add_column("value", justify="right")
    table.add_column("why", style="dim")
    for reason in plan.reasons:
        table.add_row(Text(reason.name), Text(reason.value), Text(reason.why))
    console.print(table)
