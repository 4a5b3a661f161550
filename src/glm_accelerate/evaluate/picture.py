"""Held-out loss over steps with its 95 % interval, the training loss thin behind it, as an SVG.

Losses of the beginning, far above all later ones, are cut off, or they would leave no room for the others.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from glm_accelerate.evaluate.results import Result
from glm_accelerate.observe.figures import enclosed
from glm_accelerate.observe.picture import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Frame,
    Point,
    axes,
    opening,
    smoothed,
    thinned,
    ticks,
)

FAR = 2.0  # so many times the range of the later half above it, earlier losses are cut off
MOST_WHISKERS = 40  # more would be a fence: then the band alone has to do
FLOOR, CAP = HEIGHT - BOTTOM, 4

STYLE = """<style>
.band { fill: #c2410c; opacity: 0.15; } .whisker { stroke: #c2410c; stroke-width: 1.2; opacity: 0.75; }
.ring { stroke: #15803d; fill: none; stroke-width: 2.5; } .praise { fill: #15803d; font-weight: 600; }
.level { stroke: #c2410c; fill: #ffffff; stroke-width: 1.8; }
.missed { stroke: #5f6b7a; fill: #ffffff; stroke-width: 1.5; } .broken { stroke: #b91c1c; stroke-width: 2; }
.over { paint-order: stroke; stroke: #ffffff; stroke-width: 4px; stroke-linejoin: round; }
@media (prefers-color-scheme: dark) {
.band { fill: #fb923c; opacity: 0.2; } .whisker { stroke: #fb923c; }
.ring { stroke: #4ade80; } .praise { fill: #4ade80; }
.level { stroke: #fb923c; fill: #12171d; }
.missed { stroke: #9aa6b2; fill: #12171d; } .broken { stroke: #f87171; } .over { stroke: #12171d; }
}</style>"""


@dataclass(frozen=True, slots=True)
class Judged:
    """One evaluation that has a loss."""

    step: int
    loss: float
    low: float
    high: float
    gain: bool  # better than the best before it, on the same samples


def held_out_curve(train: Sequence[Point], results: Sequence[Result], best: int | None, title: str) -> str:
    """An SVG. `train`: steps and losses; `results`: one a step, in order; `best`: the step to be marked."""
    judged = [one for result in results if (one := _judged(result)) is not None]
    lowest, highest = _range(judged)
    marks = ticks(lowest, highest)
    last_step = max([1.0, *(step for step, _ in train), *(float(result.step) for result in results)])
    frame = Frame(last_step, marks[-1], marks[0])
    missed = [result for result in results if result.status != "done"]
    behind = thinned(smoothed(train, len(train) // 80))
    parts = [
        *opening(title),
        STYLE,
        *axes(frame, marks),
        f'<clipPath id="within"><rect x="{LEFT - CAP}" y="{TOP}" width="{WIDTH - LEFT - RIGHT + 2 * CAP}" '
        f'height="{FLOOR - TOP}"/></clipPath>',
        '<g clip-path="url(#within)">',
        f'<polyline class="train" points="{frame.path(behind)}"/>',
        *_intervals(frame, judged),
        f'<polyline class="held" points="{frame.path((one.step, one.loss) for one in judged)}"/>',
        "</g>",
        *(_dot(frame, one, one is judged[0]) for one in judged),
        *(_mark(frame.x(result.step), FLOOR, result.status) for result in missed),
        *_best(frame, next((one for one in judged if one.step == best), None)),
        *_legend({*(result.status for result in missed), *("no gain" for one in judged if not one.gain)}),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _judged(result: Result) -> Judged | None:
    if result.loss is None:
        return None
    low, high = result.ci95 or (result.loss, result.loss)
    gain = result.against is None or result.against.verdict == "better"
    return Judged(result.step, result.loss, low, high, gain)


def _range(judged: Sequence[Judged]) -> tuple[float, float]:
    """Of all intervals but those of the beginning that would press the later half flat."""
    if not judged:
        return 0.0, 1.0
    later = judged[len(judged) // 2 :]
    low, high = min(one.low for one in later), max(one.high for one in later)
    limit = high + FAR * (high - low) if len(judged) > 3 else math.inf
    shown = [one for one in judged if one.high <= limit]
    low, high = min(one.low for one in shown), max(one.high for one in shown)
    return (low, high) if high > low else (low - 0.05, high + 0.05)


def _intervals(frame: Frame, judged: Sequence[Judged]) -> Iterable[str]:
    around = [
        *((float(one.step), one.high) for one in judged),
        *((float(one.step), one.low) for one in reversed(judged)),
    ]
    yield f'<polygon class="band" points="{frame.path(around)}"/>'
    for one in judged if len(judged) <= MOST_WHISKERS else ():
        x, low, high = frame.x(one.step), frame.y(one.low), frame.y(one.high)
        caps = f"M{x - CAP:.1f} {low:.1f}h{2 * CAP}M{x - CAP:.1f} {high:.1f}h{2 * CAP}"
        yield f'<path class="whisker" d="M{x:.1f} {low:.1f}V{high:.1f}{caps}"/>'


def _dot(frame: Frame, one: Judged, first: bool) -> str:
    """Where it is; at the upper edge, if it lies beyond. The first one's loss is written there."""
    x, said = (
        frame.x(one.step),
        f"<title>step {one.step:,}: {enclosed(one.loss, (one.low, one.high))}</title>",
    )
    if one.loss <= frame.highest:
        kind = "dot" if one.gain else "level"
        return f'<circle class="{kind}" cx="{x:.1f}" cy="{frame.y(one.loss):.1f}" r="3.5">{said}</circle>'
    loss = f'<text class="over" x="{x + 10:.1f}" y="{TOP + 8}">{one.loss:.4g}</text>' if first else ""
    return f'<path class="dot" d="M{x:.1f} {TOP - 2}l6 9h-12z">{said}</path>{loss}'


def _mark(x: float, y: float, kind: str) -> str:
    """An evaluation that was asked for and found nothing: hollow if skipped, else a cross."""
    if kind in ("skipped", "no gain"):
        shape = "missed" if kind == "skipped" else "level"
        return f'<circle class="{shape}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'
    return f'<path class="broken" d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8"/>'


def _best(frame: Frame, one: Judged | None) -> Iterable[str]:
    if one is None:
        return
    x, y = frame.x(one.step), frame.y(one.loss)
    yield f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="7.5"/>'
    anchor = "end" if x > WIDTH / 2 else "start"
    below = frame.y(one.low) + 20
    line = below if below < FLOOR - 6 else frame.y(one.high) - 12
    said = f"best: step {one.step:,}, {enclosed(one.loss, (one.low, one.high))}"
    yield f'<text class="praise over" x="{x:.1f}" y="{line:.1f}" text-anchor="{anchor}">{said}</text>'


def _legend(marks: set[str]) -> Iterable[str]:
    """Lines above the picture; marks below it, beside the word `step`."""
    for y, kinds in (
        (30, {"train": "training", "held": "held out, 95 %"}),
        (HEIGHT - 16, {mark: mark for mark in sorted(marks)}),
    ):
        x = WIDTH - RIGHT - sum(36 + 7 * len(said) for said in kinds.values())
        for kind, said in kinds.items():
            if kind in marks:
                yield _mark(x + 14, y, kind)
            else:
                yield f'<line class="{kind}" x1="{x}" y1="{y}" x2="{x + 24}" y2="{y}"/>'
            yield f'<text x="{x + 30}" y="{y + 4}">{said}</text>'
            x += 36 + 7 * len(said)
