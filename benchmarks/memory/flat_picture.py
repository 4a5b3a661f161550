"""Memory over steps as an SVG, in the style of the loss curve: for each side the most of each step as a light
line, and the most up to then as a dark one.
"""

from collections.abc import Sequence
from html import escape
from itertools import accumulate

from glm_accelerate.observe.picture import BOTTOM, HEIGHT, LEFT, RIGHT, STYLE, TOP, WIDTH, Frame

SIDES = ("stock", "ours")
COLOURS = """
.stock { stroke: #c2410c; fill: none; } .ours { stroke: #1f6fb5; fill: none; }
.each { stroke-width: 1; opacity: 0.4; } .most { stroke-width: 2; }
@media (prefers-color-scheme: dark) { .stock { stroke: #fb923c; } .ours { stroke: #6db3f2; } }"""


def curves(stock: Sequence[float], ours: Sequence[float], title: str, unit: str) -> str:
    """Both sides over the same steps; the highest value fills the height."""
    most = max(*stock, *ours)
    frame = Frame(float(max(len(stock), len(ours))), most * 1.05)
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title><style>{STYLE}{COLOURS}</style>",
        f'<text x="{LEFT}" y="24" font-size="16" font-weight="600">{escape(title)}</text>',
        f'<line class="axis" x1="{LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>',
        f'<text x="{(LEFT + right) / 2:g}" y="{HEIGHT - 12}" text-anchor="middle">step</text>',
        f'<text class="quiet" x="{right}" y="{bottom + 18}" text-anchor="end">{frame.last_step:,g}</text>',
    ]
    for share in (0.25, 0.5, 0.75, 1.0):
        y = frame.y(share * most)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        said = f"{share * most:,.0f}{' ' + unit if share == 1 else ''}"
        parts.append(f'<text class="quiet" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{said}</text>')
    for place, (side, values) in enumerate(zip(SIDES, (stock, ours), strict=True)):
        points = [(float(step), value) for step, value in enumerate(values, 1)]
        highest = [(float(step), value) for step, value in enumerate(accumulate(values, max), 1)]
        parts.append(f'<polyline class="{side} each" points="{frame.path(points)}"/>')
        parts.append(f'<polyline class="{side} most" points="{frame.path(highest)}"/>')
        x = right - 150 + 80 * place
        parts.append(f'<line class="{side} most" x1="{x}" y1="{TOP - 14}" x2="{x + 24}" y2="{TOP - 14}"/>')
        parts.append(f'<text x="{x + 30}" y="{TOP - 10}">{side}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
