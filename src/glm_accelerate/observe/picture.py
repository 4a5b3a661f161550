"""The loss curve of a run as a chart, and as a line for terminals."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from glm_accelerate.observe.chart import Frame, Point, axes, legend, opening, smoothed, thinned, ticks
from glm_accelerate.observe.events import Event

BLOCKS = "▁▂▃▄▅▆▇█"


def losses(events: Iterable[Event], kind: str) -> list[Point]:
    """The losses of `step` or of `eval` events, in order of steps; what is not finite is left out."""
    points: list[Point] = []
    for event in events:
        step, loss = event.get("step"), event.get("loss")
        if event["kind"] == kind and isinstance(step, int) and isinstance(loss, int | float):
            points.append((float(step), float(loss)))
    return sorted(point for point in points if math.isfinite(point[1]))


def loss_curve(events: Sequence[Event], title: str) -> str:
    """An SVG with the training loss of every step, its running mean, and the held-out loss."""
    train, held = losses(events, "step"), losses(events, "eval")
    every = [*train, *held]
    last_step = max((step for step, _ in every), default=1.0) or 1.0
    shown = [0.0, *(loss for _, loss in every)]
    marks = ticks(min(shown), max(shown) if any(shown) else 1.0)
    frame = Frame(last_step, marks[-1], marks[0])
    mean = smoothed(train, len(train) // 80)
    parts = [
        *opening(title),
        *axes(frame, marks, "step", "loss (nats a token)"),
        f'<polyline class="train" points="{frame.path(thinned(train))}"/>',
        f'<polyline class="smooth" points="{frame.path(thinned(mean))}"/>',
        f'<polyline class="held" points="{frame.path(held)}"/>',
        *(f'<circle class="dot" cx="{frame.x(s):.1f}" cy="{frame.y(y):.1f}" r="3.5"/>' for s, y in held),
        *legend({"smooth": "training", "held": "held out"}),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The course of some values in one line of blocks; each is the mean of its stretch."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [len(values) * index // width for index in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(BLOCKS[round((mean - low) / span * (len(BLOCKS) - 1))] for mean in means)
