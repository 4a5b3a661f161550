"""A plan as a person reads it: every derived value and why it is so, the memory it needs, how long it takes,
and what to type where it does not fit.
"""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.memory.job import Where
from glm_accelerate.models.sizes import Sizes
from glm_accelerate.plan.run_plan import Memory, Reason
from glm_accelerate.plan.weigh import Advice, Duration, quoted, typed
from glm_accelerate.runtime.screen import say
from glm_accelerate.runtime.words import amount, duration

HIGHEST_USUAL_RATE = 0.1
WHERE: dict[Where, str] = {"device": "of a device", "host": "of the host", "disk": "on disk"}


def show_plan(reasons: Sequence[Reason], console: Console) -> None:
    """Print the table. Names and values come from files, so nothing in them is read as markup."""
    table = _table("what", "value", "why")
    for reason in reasons:
        table.add_row(Text(reason.name), Text(reason.value), Text(reason.why))
    console.print(table)


def show_memory(memory: Memory, console: Console) -> None:
    """What is alive at the worst moment, and whether it fits."""
    table = _table("memory", "bytes", "why")
    for where, words in WHERE.items():
        items = [item for item in memory.items if item.where == where and item.bytes]
        for item in items:
            table.add_row(Text(item.what), Text(amount(item.bytes)), Text(item.why))
        if items:
            phase = f"peak, in the {memory.phase}" if where == "device" else ""
            table.add_row(Text(words, "bold"), Text(amount(memory.total(where)), "bold"), Text(phase))
    console.print(table)
    room = amount(memory.room)
    apart = amount(abs(memory.room - memory.needed))
    if memory.fits:
        say(console, ("it fits", "bold green"), f": {apart} are left of {room} {memory.room_why}")
    else:
        say(console, ("it does not fit", "bold red"), f": {apart} more than the {room} {memory.room_why}")


def show_duration(found: Duration, devices: int, price: float | None, console: Console) -> None:
    """Time, and what it costs where the user named a price."""
    taken = "unknown" if found.seconds is None else f"about {duration(found.seconds)}"
    why = f"{found.tokens:,.0f} tokens, {found.flops:.3g} operations; {found.why}"
    say(console, ("time ", "bold"), f"{taken}  ", (why, "dim"))
    if price is not None and found.seconds is not None:
        hours = found.seconds / 3600 * devices
        why = f"{hours:,.3g} hours of a device at {price:g}"
        say(console, ("cost ", "bold"), f"{hours * price:,.2f}  ", (why, "dim"))


def show_warnings(warnings: Sequence[str], console: Console) -> None:
    """A line each."""
    for warning in warnings:
        say(console, ("warning ", "bold yellow"), warning)


def show_advice(advice: Advice, command: Sequence[str], console: Console) -> None:
    """The ladder, and the command that fits. `command`: what was typed, without the program's name."""
    say(console, f"taken already: {', '.join(advice.taken)}", style="dim")
    table = _table("the ladder, each rung on those above", "needs", "why")
    table.add_column("time", justify="right")
    for rung in advice.rungs:
        mark = "bold green" if rung.wanted else ""
        cells = Text(rung.override, mark), Text(amount(rung.bytes), mark), Text(rung.why)
        table.add_row(*cells, f"x {rung.times:.2f}")
    console.print(table)
    if advice.overrides is None:
        console.print(Text(f"no rung makes it fit: the least is {amount(advice.bytes)}", "bold red"))
        return
    taken = "" if advice.seconds is None else f", about {duration(advice.seconds)}"
    needs = f"  ({amount(advice.bytes)}{taken})"
    console.print(Text.assemble(("the cheapest change that makes it fit", "bold green"), (needs, "dim")))
    line = f"glm-accelerate {' '.join(map(quoted, command))} {typed(advice.overrides, 'plan')}"
    console.print(Text(line), soft_wrap=True)


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    first, second, third = names
    table.add_column(first, no_wrap=True)
    table.add_column(second, justify="right", no_wrap=second != "value")
    table.add_column(third, style="dim")
    return table


def unusual(config: RunConfig, sizes: Sizes, longest: int) -> list[str]:
    """What may be meant, but hardly is, a line each. `longest`: tokens of the longest sample."""
    lines: list[str] = []
    rate = config.optim.learning_rate
    if rate > HIGHEST_USUAL_RATE:
        lines.append(f"optim.learning_rate is {rate:g}: usual are 1e-5 to 1e-2, and far higher ones diverge")
    if longest > sizes.max_positions:
        positions = f"the model was made for {sizes.max_positions:,} positions"
        lines.append(f"the longest sample has {longest:,} tokens, and {positions} (data.max_tokens)")
    return lines
