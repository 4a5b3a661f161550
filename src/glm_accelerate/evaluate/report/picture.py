"""Held-out loss over steps with its 95 % interval, the training loss thin behind it, as an SVG.

Losses of the beginning, far above all later ones, are cut off: they would leave no room for the others.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from glm_accelerate.evaluate.protocol.messages import EvaluationResult
from glm_accelerate.observe.chart import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Frame,
    Point,
    axes,
    legend,
    opening,
    smoothed,
    thinned,
    ticks,
)
from glm_accelerate.observe.figures import above_zero, enclosed

MOST = 0.75  # of evaluations, and of the training curve's second half: the lowest are always shown
FLATTEST = 0.05  # of the loss: a picture that is less tall would make mountains of noise
MOST_WHISKERS = 40  # with more only the band is drawn
FLOOR, CAP = HEIGHT - BOTTOM, 4

STYLE = """
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
}"""


@dataclass(frozen=True, slots=True)
class EvaluatedStep:
    """One evaluation that has a loss."""

    step: int
    loss: float
    low: float
    high: float
    gain: bool  # better than the best before it, or the best of all


def held_out_curve(
    train: Sequence[Point],
    results: Sequence[EvaluationResult],
    gains: Collection[int],
    best: int | None,
    title: str,
    word: str = "best",
) -> str:
    """An SVG. `train`: steps and losses; `results`: one a step, in order; `gains`: the steps that were better
    than all before; `best`: the step to mark, with `word` as its label.
    """
    evaluated = [one for result in results if (one := _evaluated(result, {*gains, best})) is not None]
    behind = thinned(smoothed(train, len(train) // 80))
    lowest, highest = _range(evaluated, [loss for _, loss in behind[len(behind) // 2 :]], best)
    marks = ticks(lowest, highest)
    last_step = max([1.0, *(step for step, _ in train), *(float(result.step) for result in results)])
    frame = Frame(last_step, marks[-1], marks[0])
    missed = [result for result in results if result.status != "done"]
    parts = [
        *opening(title, STYLE),
        *axes(frame, marks, "step", "loss (nats a token)"),
        f'<clipPath id="within"><rect x="{LEFT - CAP}" y="{TOP}" width="{WIDTH - LEFT - RIGHT + 2 * CAP}" '
        f'height="{FLOOR - TOP}"/></clipPath>',
        '<g clip-path="url(#within)">',
        f'<polyline class="train" points="{frame.path(behind)}"/>',
        *_intervals(frame, evaluated),
        f'<polyline class="held" points="{frame.path((one.step, one.loss) for one in evaluated)}"/>',
        "</g>",
        *(_dot(frame, one, one is evaluated[0]) for one in evaluated),
        *(_mark(frame.x(result.step), FLOOR, result.status) for result in missed),
        *_best(frame, next((one for one in evaluated if one.step == best), None), word),
        *_legend(
            {*(result.status for result in missed), *("no gain" for one in evaluated if not one.gain)},
            "held out, 95 %" if any(one.low < one.high for one in evaluated) else "held out",
        ),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _evaluated(result: EvaluationResult, gains: Collection[int | None]) -> EvaluatedStep | None:
    if result.loss is None:
        return None
    low, high = above_zero(result.ci95) or (result.loss, result.loss)
    return EvaluatedStep(result.step, result.loss, low, high, result.step in gains)


def _range(
    evaluated: Sequence[EvaluatedStep], train: Sequence[float], best: int | None
) -> tuple[float, float]:
    """Losses to show: from the lowest to what holds most, the later half (what comes last is news) and the
    best. `train`: the training curve's second half.
    """
    lows = [*(one.low for one in evaluated), *train]
    if not lows:
        return 0.0, 1.0
    later = evaluated[len(evaluated) // 2 :] if len(evaluated) > 3 else evaluated
    highs = [
        *(
            sorted(losses)[int(MOST * (len(losses) - 1))]
            for losses in ([one.high for one in evaluated], train)
            if losses
        ),
        *(one.high for one in [*later, *(one for one in evaluated if one.step == best)]),
    ]
    low, high = min(lows), max(highs)
    lacking = max(0.0, max(FLATTEST * abs(high), 1e-3) - (high - low)) / 2
    return max(0.0, low - lacking), high + lacking


def _intervals(frame: Frame, evaluated: Sequence[EvaluatedStep]) -> Iterable[str]:
    around = [
        *((float(one.step), one.high) for one in evaluated),
        *((float(one.step), one.low) for one in reversed(evaluated)),
    ]
    yield f'<polygon class="band" points="{frame.path(around)}"/>'
    for one in evaluated if len(evaluated) <= MOST_WHISKERS else ():
        x, low, high = frame.x(one.step), frame.y(one.low), frame.y(one.high)
        caps = f"M{x - CAP:.1f} {low:.1f}h{2 * CAP}M{x - CAP:.1f} {high:.1f}h{2 * CAP}"
        yield f'<path class="whisker" d="M{x:.1f} {low:.1f}V{high:.1f}{caps}"/>'


def _dot(frame: Frame, one: EvaluatedStep, first: bool) -> str:
    """A dot, or an arrow at the upper edge if the loss lies beyond. The first one's loss is written there."""
    x, title = (
        frame.x(one.step),
        f"<title>step {one.step:,}: {enclosed(one.loss, (one.low, one.high))}</title>",
    )
    if one.loss <= frame.highest:
        kind = "dot" if one.gain else "level"
        return f'<circle class="{kind}" cx="{x:.1f}" cy="{frame.y(one.loss):.1f}" r="3.5">{title}</circle>'
    loss = f'<text class="over" x="{x + 10:.1f}" y="{TOP + 8}">{one.loss:.4g}</text>' if first else ""
    return f'<path class="dot" d="M{x:.1f} {TOP - 2}l6 9h-12z">{title}</path>{loss}'


def _mark(x: float, y: float, kind: str) -> str:
    """An evaluation without a loss: hollow if skipped, else a cross."""
    if kind in ("skipped", "no gain"):
        shape = "missed" if kind == "skipped" else "level"
        return f'<circle class="{shape}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'
    return f'<path class="broken" d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8"/>'


def _best(frame: Frame, one: EvaluatedStep | None, word: str) -> Iterable[str]:
    """A ring around the best; its figures stand below the picture, where no line runs."""
    if one is None:
        return
    for x, y in ((frame.x(one.step), frame.y(one.loss)), (LEFT + 8, HEIGHT - 16)):
        yield f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="7.5"/>'
    text = f"{word}: step {one.step:,}, {enclosed(one.loss, (one.low, one.high))}"
    yield f'<text class="praise" x="{LEFT + 22}" y="{HEIGHT - 12}">{text}</text>'


def _legend(marks: set[str], held: str) -> Iterable[str]:
    """Lines above the chart; marks below it, beside the word `step`."""
    yield from legend({"train": "training", "held": held})
    x, y = WIDTH - RIGHT - sum(36 + 7 * len(mark) for mark in marks), HEIGHT - 16
    for mark in sorted(marks):
        yield _mark(x + 14, y, mark)
        yield f'<text x="{x + 30}" y="{y + 4}">{mark}</text>'
        x += 36 + 7 * len(mark)
