"""Memory over steps as a chart: the most of each step as a light line, the most until then as a dark one."""

from collections.abc import Sequence
from itertools import accumulate

from glm_accelerate.observe.chart import Frame, axes, legend, opening, ticks

SIDES = ("stock", "ours")
STYLE = """
.stock { stroke: #c2410c; fill: none; } .ours { stroke: #1f6fb5; fill: none; }
.each { stroke-width: 1; opacity: 0.4; } .most { stroke-width: 2; }
@media (prefers-color-scheme: dark) { .stock { stroke: #fb923c; } .ours { stroke: #6db3f2; } }"""


def curves(stock: Sequence[float], ours: Sequence[float], title: str, unit: str) -> str:
    """Both sides over the same steps."""
    marks = ticks(0.0, max(*stock, *ours))
    frame = Frame(float(max(len(stock), len(ours))), marks[-1])
    parts = [*opening(title, STYLE), *axes(frame, marks, "step", unit)]
    for side, values in zip(SIDES, (stock, ours), strict=True):
        for kind, course in (("each", values), ("most", accumulate(values, max))):
            points = [(float(step), value) for step, value in enumerate(course, 1)]
            parts.append(f'<polyline class="{side} {kind}" points="{frame.path(points)}"/>')
    parts += legend({f"{side} most": side for side in SIDES})
    return "\n".join([*parts, "</svg>"]) + "\n"
