"""Figures as people read them: to the digit that is known, and no further."""

import math
from collections.abc import Mapping, Sequence
from typing import cast

from glm_accelerate.observe.events import Event

FEWEST_TO_COMPARE = 30  # samples: with fewer, nothing is said about what they are enough for
SIGNIFICANT = 2  # digits of an interval's half width; its centre is written to the same decimal
FEWEST, MOST = 1, 6  # decimals


def number(event: Mapping[str, object], name: str) -> float:
    """A field, 0 if it is missing."""
    value = event.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def enclosed(loss: float, interval: Sequence[float] | None) -> str:
    """`2.114 ±0.035`, by the longer side, or `0.5 (0.0 to 3.1)` where that would reach below zero, which a
    loss cannot; four decimals where there is no interval or it has no width.
    """
    low, high = above_zero(interval) or (loss, loss)
    half = max(high - loss, loss - low)
    if half <= 0:
        return f"{loss:.4f}"
    decimals = places(half)
    if half > loss:
        return f"{loss:.{decimals}f} ({low:.{decimals}f} to {high:.{decimals}f})"
    return f"{loss:.{decimals}f} ±{half:.{decimals}f}"


def above_zero(interval: Sequence[float] | None) -> tuple[float, float] | None:
    """The part of a loss's interval that is not negative: with very few samples it may reach further."""
    return None if interval is None else (max(0.0, interval[0]), interval[1])


def places(half: float) -> int:
    """The number of decimals that mean something beside an interval of this half width."""
    if half <= 0:
        return 4
    return min(MOST, max(FEWEST, SIGNIFICANT - 1 - math.floor(math.log10(half))))


def metric(value: float) -> str:
    """A share to three decimals, a score out of a hundred to one."""
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def compared(against: Mapping[str, object]) -> str:
    """A comparison's fields as `-0.0213 against 300: better` (a hyphen: not every terminal has a minus)."""
    difference = number(against, "difference")
    why = ", too few samples to tell" if against["verdict"] == "undecided" else ""
    return f"{difference:+.4f} against {against['step']:,}: {against['verdict']}{why}"


def evaluation(event: Event, *, whole: bool = False) -> str:
    """An `eval` event in one line. `whole`: a finalist's, once more and on all samples."""
    loss, step = event.get("loss"), f"step {number(event, 'step'):,.0f}"
    metrics = cast("Mapping[str, float]", event.get("metrics") or {})
    interval = cast("Sequence[float] | None", event.get("ci95"))
    words = [f"loss {enclosed(loss, interval)}"] if isinstance(loss, float) else []
    words += [f"{name} {metric(value)}" for name, value in metrics.items()]
    samples, total = number(event, "samples") or number(event, "answers"), number(event, "total")
    count = f"on all {total:,.0f} samples" if whole else f"({samples:,.0f} of {total:,.0f})"
    parts = [f"{', '.join(words)} {count}"] if words else []
    if event.get("status") != "done":
        reason = event.get("reason")
        parts.append(f"{event.get('status')}: {reason}" if reason else str(event.get("status")))
    against = event.get("against")
    if isinstance(against, Mapping):
        parts.append(compared(cast("Mapping[str, object]", against)))
    if number(event, "seconds"):
        parts.append(f"{number(event, 'seconds'):.1f} s {event.get('where', '')}".rstrip())
    return f"{step}: {' · '.join(parts)}"
