"""Charts as SVG without a plotting library: bars, and what charts of lines over steps are made of.

They are readable on light and on dark backgrounds.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, pairwise

from glm_accelerate.observe.events import Event

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 76, 28, 44, 52
NAMES, FIGURES, BAR, THICKNESS = 220, 90, 30, 18  # of bars: room for names and figures, a bar's share, a bar
BLOCKS = "▁▂▃▄▅▆▇█"
MOST_POINTS = 600  # about as many as a chart has pixels in its width
SMALLEST_SPAN = 1e-9  # of an axis, as a share of its largest value: below that all figures are alike
LONGEST_TITLE, LONGEST_OF_BARS = 42, 80  # characters: a chart of lines has its legend beside the title

STYLE = """\
svg { background: #ffffff; font: 13px system-ui, sans-serif; }
text { fill: #1f2933; } .quiet { fill: #5f6b7a; }
.grid { stroke: #dfe4ea; stroke-width: 1; } .axis { stroke: #5f6b7a; stroke-width: 1; }
.train { stroke: #9bb4d0; fill: none; stroke-width: 1.2; }
.held { stroke: #c2410c; fill: none; stroke-width: 2; } .dot { fill: #c2410c; }
.bar { fill: #1f6fb5; }
@media (prefers-color-scheme: dark) {
svg { background: #12171d; } text { fill: #e6ebf0; } .quiet { fill: #9aa6b2; }
.grid { stroke: #2a323b; } .axis { stroke: #9aa6b2; }
.train { stroke: #35506b; }
.held { stroke: #fb923c; } .dot { fill: #fb923c; }
.bar { fill: #6db3f2; }
}"""

Point = tuple[float, float]  # step, value


@dataclass(frozen=True, slots=True)
class Frame:
    """Turns steps and values into coordinates of a chart."""

    last_step: float
    highest: float
    lowest: float = 0.0

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / self.last_step

    def y(self, value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (self.highest - value) / (self.highest - self.lowest)

    def path(self, points: Iterable[Point]) -> str:
        return " ".join(f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in points)


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar as long as `value`, with `label` behind it."""

    name: str
    value: float
    label: str


def opening(
    title: str, style: str = "", *, height: int = HEIGHT, left: int = LEFT, longest: int = LONGEST_TITLE
) -> list[str]:
    """The beginning of a chart: its size, colours and title."""
    whole = escaped(title)
    short = escaped(title if len(title) <= longest else title[: longest - 1] + "…")
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{whole}">',
        f"<title>{whole}</title><style>{STYLE}{style}</style>",
        f'<text x="{left}" y="24" font-size="16" font-weight="600">{short}</text>',
    ]


def axes(frame: Frame, marks: Sequence[float], below: str, beside: str) -> list[str]:
    """Lines at the values in `marks`, numbers along both axes, and the names of the axes."""
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [f'<line class="axis" x1="{LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>']
    for value in marks:
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="quiet" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:,g}</text>'
        )
    for step in ticks(0.0, frame.last_step):
        if step <= frame.last_step and step == round(step):
            x = frame.x(step)
            parts.append(
                f'<text class="quiet" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{step:,g}</text>'
            )
    middle_x, middle_y = (LEFT + right) / 2, (TOP + bottom) / 2
    parts.append(f'<text x="{middle_x:g}" y="{HEIGHT - 12}" text-anchor="middle">{below}</text>')
    parts.append(
        f'<text x="15" y="{middle_y:g}" text-anchor="middle" transform="rotate(-90 15 {middle_y:g})">'
        f"{beside}</text>"
    )
    return parts


def legend(kinds: Mapping[str, str]) -> list[str]:
    """A line of each class with its name, above the chart on the right."""
    x, parts = WIDTH - RIGHT - sum(36 + 7 * len(name) for name in kinds.values()), list[str]()
    for kind, name in kinds.items():
        parts.append(f'<line class="{kind}" x1="{x}" y1="30" x2="{x + 24}" y2="30"/>')
        parts.append(f'<text x="{x + 30}" y="34">{name}</text>')
        x += 36 + 7 * len(name)
    return parts


def bars(items: Sequence[Bar], title: str) -> str:
    """A chart of bars, from the top in the given order; the longest fills the width."""
    most = max((item.value for item in items), default=0.0) or 1.0
    parts = opening(title, height=TOP + 12 + BAR * len(items) + 12, left=16, longest=LONGEST_OF_BARS)
    for number, item in enumerate(items):
        y = TOP + 12 + BAR * number
        long = max(1.0, (WIDTH - NAMES - FIGURES) * item.value / most)
        parts += [
            f'<text x="{NAMES - 10}" y="{y + 13}" text-anchor="end">{escaped(item.name)}</text>',
            f'<rect class="bar" x="{NAMES}" y="{y}" width="{long:.1f}" height="{THICKNESS}" rx="2"/>',
            f'<text class="quiet" x="{NAMES + long + 8:.1f}" y="{y + 13}">{escaped(item.label)}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def smoothed(points: Sequence[Point], reach: int) -> list[Point]:
    """A running mean: of each point and those up to `reach` places before and after it."""
    sums = [0.0, *accumulate(value for _, value in points)]
    means: list[Point] = []
    for index, (step, _) in enumerate(points):
        first, last = max(0, index - reach), min(len(points), index + reach + 1)
        means.append((step, (sums[last] - sums[first]) / (last - first)))
    return means


def ticks(lowest: float, highest: float) -> list[float]:
    """Round numbers from just below `lowest` to just above `highest`: four to ten, never fewer than two."""
    rough = max(highest - lowest, SMALLEST_SPAN * max(1.0, abs(lowest), abs(highest))) / 6
    scale = 10.0 ** math.floor(math.log10(rough))
    unit = next(scale * factor for factor in (1, 2, 5, 10) if scale * factor >= rough)
    first, last = math.floor(lowest / unit + 1e-9), math.ceil(highest / unit - 1e-9)
    return [round(unit * index, 10) for index in range(first, max(first + 1, last) + 1)]


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """Some of the points, at most as many as are worth drawing."""
    return points[:: max(1, math.ceil(len(points) / MOST_POINTS))]


def escaped(text: str) -> str:
    """Any text within XML, which has no control characters."""
    return escape("".join(letter if letter.isprintable() else "?" for letter in text))


def losses(events: Iterable[Event], kind: str) -> list[Point]:
    """The finite losses of `step` or of `eval` events, in order of steps."""
    points: list[Point] = []
    for event in events:
        step, loss = event.get("step"), event.get("loss")
        if event["kind"] != kind or not isinstance(step, int):
            continue
        if isinstance(loss, int | float) and math.isfinite(loss):
            points.append((float(step), float(loss)))
    return sorted(points)


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Values as one line of blocks, each the mean of a stretch of them."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [len(values) * index // width for index in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(BLOCKS[round((mean - low) / span * (len(BLOCKS) - 1))] for mean in means)
