"""Bars as an SVG that reads well on light and dark ground, in the style of the loss curve."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from glm_accelerate.observe.picture import STYLE

WIDTH, LEFT, RIGHT = 720, 220, 90
TOP, EACH, THICK = 56, 30, 18
BARS = ".bar { fill: #1f6fb5; } @media (prefers-color-scheme: dark) { .bar { fill: #6db3f2; } }"


@dataclass(frozen=True, slots=True)
class Bar:
    """One line of the picture; `value` is drawn, `said` stands behind it."""

    name: str
    value: float
    said: str


def bars(items: Sequence[Bar], title: str) -> str:
    """From the top in the order given; the longest fills the width."""
    most = max((item.value for item in items), default=0.0) or 1.0
    height = TOP + EACH * len(items) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title><style>{STYLE} {BARS}</style>",
        f'<text x="16" y="30" font-size="16" font-weight="600">{escape(title)}</text>',
    ]
    for number, item in enumerate(items):
        y = TOP + EACH * number
        long = max(1.0, (WIDTH - LEFT - RIGHT) * item.value / most)
        parts += [
            f'<text x="{LEFT - 10}" y="{y + 13}" text-anchor="end">{escape(item.name)}</text>',
            f'<rect class="bar" x="{LEFT}" y="{y}" width="{long:.1f}" height="{THICK}" rx="2"/>',
            f'<text class="quiet" x="{LEFT + long + 8:.1f}" y="{y + 13}">{escape(item.said)}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"
