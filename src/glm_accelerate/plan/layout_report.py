"""The layouts of a cluster as a person reads them: a line each, why the others lose, and of the best what
travels in a step and what to type.
"""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.plan.ground import Ground
from glm_accelerate.plan.layouts import (
    Cluster,
    LayoutComparison,
    WeighedLayout,
    chosen_layouts,
    cluster_of,
    divided_over,
)
from glm_accelerate.plan.run_plan import Reason
from glm_accelerate.plan.step_time import AXES, RankLayout
from glm_accelerate.plan.weigh import Weighed
from glm_accelerate.runtime.screen import say
from glm_accelerate.runtime.words import amount, duration

SHOWN, LARGE = 6, 3  # layouts that fit, and that do not
SHARED = {
    "tensor": "sums of products",
    "context": "keys and values",
    "shard": "weights, gradients",
    "data": "gradients",
    "pipeline": "activations",
}


def show_layouts(found: LayoutComparison, console: Console) -> None:
    """A table with a star at how the config has it now, why the others lose, and what travels in the best."""
    cluster, machines = found.cluster, found.cluster.machines
    nodes = f" in {cluster.nodes} nodes" if cluster.nodes > 1 else ""
    say(console, (f"layouts of {cluster.gpus} {cluster.device.name}{nodes}", "bold"))
    links = f"{cluster.device.wire} {machines.inside / 1e9:,.0f} GB/s"
    if cluster.nodes > 1:
        links += f", network {machines.network * 8 / 1e9:,.0f} Gbit/s a node ({cluster.network_why})"
    say(console, links, style="dim")
    if found.overrides or not found.fitting:
        least = min(found.too_large, key=lambda one: one.needed)
        needs = f"no layout fits: the least needs {amount(least.needed)} a rank of {amount(least.room)}"
        say(console, (needs, "bold red"))
        say(console, f"weights, gradients and moments alone are {amount(found.state)}")
    if found.overrides:
        say(console, "with ", (" ".join(found.overrides), "bold"), ":")
    shown = _shown(found)
    console.print(_table(found, shown))
    for number, one in enumerate(shown, 1):
        if number > 1 or not one.fits:
            say(console, (f"{number} ", "bold"), reason(cluster, next(iter(found.fitting), None), one))
    if found.fitting:
        _show_best(found, console)
    for refusal in found.refused:
        say(console, ("left out ", "bold yellow"), refusal)


def _shown(found: LayoutComparison) -> list[WeighedLayout]:
    """The fastest that fit; those that would be faster if they did; data parallel alone; how it is now."""
    best = found.fitting[0].time.seconds if found.fitting else float("inf")
    large = [] if found.overrides else [one for one in found.too_large if one.time.seconds < best]
    shown = [*found.fitting[:SHOWN], *large[:LARGE]]
    for one in (found.alone, *(() if found.overrides else (found.own,))):
        if all(_sizes(one) != _sizes(other) for other in shown):
            shown.append(one)
    return sorted(shown, key=lambda one: (not one.fits, one.time.seconds))


def _sizes(one: WeighedLayout) -> tuple[int, ...]:
    return tuple(one.layout.size(axis) for axis in AXES)


def _table(found: LayoutComparison, shown: Sequence[WeighedLayout]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    heads = (
        "",
        "data",
        "shard",
        "ctx",
        "tensor",
        "pipe",
        "pass",
        "rec",
        "GiB",
        "step",
        "tokens/s",
        "MFU",
        "idle",
    )
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for number, one in enumerate(shown, 1):
        layout, time = one.layout, one.time
        sizes = (layout.data, layout.shard, layout.context, layout.tensor, layout.pipeline)
        style = "" if one.fits else "dim"
        cells = (
            f"{number}{'*' if _sizes(one) == _sizes(found.own) else ''}",
            *(str(size) for size in sizes),
            f"{layout.micro_tokens:,}",
            f"{layout.recompute:.0%}" if 0 < layout.recompute < 1 else "on" if layout.recompute else "off",
            f"{one.needed / 2**30:,.1f}" if one.fits else f">{one.needed / 2**30:,.0f}",
            duration(time.seconds),
            f"{found.per_second(one):,.0f}",
            f"{found.utilisation(one):.0%}",
            f"{max(0.0, time.bubble) / time.seconds:.0%}",
        )
        table.add_row(
            *(Text(cell, "bold green" if one is shown[0] and one.fits else style) for cell in cells)
        )
    return table


def reason(cluster: Cluster, best: WeighedLayout | None, one: WeighedLayout) -> str:
    """Why it is not the best of those that fit."""
    if best is None or not one.fits:
        faster = f"; it would take x {one.time.seconds / best.time.seconds:.2f}" if best else ""
        return f"does not fit: {amount(one.needed - one.room)} more than {amount(one.room)}{faster}"
    ours, theirs = dict(_parts(cluster, best)), dict(_parts(cluster, one))
    what = max(theirs, key=lambda part: theirs[part] - ours.get(part, 0.0))
    more = theirs[what] - ours.get(what, 0.0)
    return f"x {one.time.seconds / best.time.seconds:.2f}: {what}, {duration(more)} more a step"


def _parts(cluster: Cluster, one: WeighedLayout) -> Iterator[tuple[str, float]]:
    """What a step consists of."""
    time = one.time
    yield ("computing, with recomputation" if one.layout.recompute else "computing"), time.computing
    yield f"stages idle {time.bubble / time.seconds:.0%}", time.bubble
    yield "updates", time.update
    for sent in time.traffic:
        if sent.axis != "pipeline":
            yield f"{SHARED[sent.axis]} wait for {_link(cluster, sent.network)}", sent.waited


def _link(cluster: Cluster, network: bool) -> str:
    return "the network" if network else cluster.device.wire


def _show_best(found: LayoutComparison, console: Console) -> None:
    """Beside data parallel alone; what travels; what to type."""
    best, alone = found.fitting[0], found.alone
    if alone.layout != best.layout:
        fits = "" if alone.fits else f", which does not fit ({amount(alone.needed - alone.room)} too much)"
        times = f"x {alone.time.seconds / best.time.seconds:.2f} as fast as data parallel alone"
        say(console, ("1 ", "bold"), f"{times}{fits}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, head in enumerate(("in each step", "of", "bytes", "over", "takes", "waited for")):
        table.add_column(head, justify="right" if place in (2, 4, 5) else "left", no_wrap=True)
    for sent in best.time.traffic:
        times = (duration(each) if each else "-" for each in (sent.seconds, sent.waited))
        table.add_row(
            sent.axis, SHARED[sent.axis], amount(sent.bytes), _link(found.cluster, sent.network), *times
        )
    console.print(table)
    say(console, ("to type ", "bold"), " ".join((*found.overrides, *typed(best.layout))))


def open_layouts(
    config: RunConfig, ground: Ground, weighed: Weighed
) -> Iterator[tuple[tuple[str, ...], Reason]]:
    """What a config would have to say for each of its best layouts, and why, the fastest first."""
    found = chosen_layouts(config, ground, weighed)
    left = {f"parallel.{axis}=1" for axis in config.parallel.open} | {"memory.recompute"}
    for place, one in enumerate(found):
        cluster = cluster_of(ground, weighed.speed)
        assert cluster is not None
        other = next(iter((*found[place + 1 :], *found[:place])), None)
        second = f"; next {named(other.layout)}, {reason(cluster, one, other)}" if other else ""
        why = f"auto: of {len(found)} that fit, {duration(one.time.seconds)} a step{second}"
        words = {word.partition("=")[0]: word for word in (*left, *typed(one.layout))}
        words.pop("memory.recompute")
        yield tuple(words.values()), Reason("layout", named(one.layout), why)


def named(layout: RankLayout) -> str:
    """The axes that it has."""
    sizes = (f"{axis} {layout.size(axis)}" for axis in reversed(AXES) if layout.size(axis) > 1)
    return " x ".join(sizes) or "1 rank"


def typed(layout: RankLayout) -> tuple[str, ...]:
    """What a config has to say for it."""
    axes = [axis for axis in ("pipeline", "context", "tensor") if layout.size(axis) > 1]
    divided = divided_over(layout)
    shard = "off" if divided == 1 else str(divided) if layout.data > 1 else "full"
    return (
        *(f"parallel.{axis}={layout.size(axis)}" for axis in axes),
        f"parallel.shard={shard}",
        f"train.micro_tokens={layout.micro_tokens}",
        f"memory.recompute={_recompute(layout)}",
    )


def _recompute(layout: RankLayout) -> str:
    return "auto" if 0 < layout.recompute < 1 else "blocks" if layout.recompute else "off"
