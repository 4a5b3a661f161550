"""Losses of several runs in one picture, and below it a loss scale by powers of two. An SVG, written by hand
as the curve of a run is (`glm_accelerate/observe/picture.py`), so that it needs no plotting library.
"""

import math
from collections.abc import Mapping, Sequence

WIDTH, LEFT, RIGHT = 760, 60, 20
TOP, MIDDLE, BELOW, BOTTOM = 48, 330, 370, 470  # losses between the first two, the scale between the others
COLOURS = ("#1f6fb5", "#c2410c", "#15803d", "#a21caf", "#0e7490")
STYLE = """\
svg { background: #ffffff; font: 13px system-ui, sans-serif; } text { fill: #1f2933; }
.quiet { fill: #5f6b7a; } .axis { stroke: #9aa6b2; stroke-width: 1; }
polyline { fill: none; stroke-width: 1.6; }
@media (prefers-color-scheme: dark) {
svg { background: #12171d; } text { fill: #e6ebf0; } .quiet { fill: #9aa6b2; }
}"""

Series = Mapping[str, Sequence[float | None]]


def curves(losses: Series, scales: Series) -> str:
    """What is not finite leaves a gap."""
    steps = max(map(len, losses.values()))
    highest = max(loss for line in losses.values() for loss in line if loss is not None)
    powers = {name: [None if s is None else math.log2(s) for s in line] for name, line in scales.items()}
    top = max((p for line in powers.values() for p in line if p is not None), default=1.0)
    low = min((p for line in powers.values() for p in line if p is not None), default=0.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {BOTTOM + 40}" role="img">',
        f"<title>Training losses in four kinds of numbers</title><style>{STYLE}</style>",
        f'<text x="{LEFT}" y="20" font-weight="600">Loss (nats a token)</text>',
        f'<text x="{LEFT}" y="{BELOW - 10}" font-weight="600">Loss scale, as a power of two</text>',
        f'<text class="quiet" x="{WIDTH / 2}" y="{BOTTOM + 32}" text-anchor="middle">step</text>',
    ]
    right = WIDTH - RIGHT
    parts += [f'<line class="axis" x1="{LEFT}" y1="{y}" x2="{right}" y2="{y}"/>' for y in (MIDDLE, BOTTOM)]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = LEFT + (WIDTH - LEFT - RIGHT) * share
        parts.append(_label(x, BOTTOM + 16, f"{round(steps * share):,}", "middle"))
        parts.append(_label(LEFT - 6, MIDDLE - (MIDDLE - TOP) * share + 4, f"{highest * share:.2g}", "end"))
    for power in (low, top):
        y = BOTTOM - (BOTTOM - BELOW) * (power - low) / max(1.0, top - low)
        parts.append(_label(LEFT - 6, y + 4, f"{power:g}", "end"))
    for place, (name, line) in enumerate(losses.items()):
        colour, x = COLOURS[place % len(COLOURS)], LEFT + 135 * place
        parts += _lines(line, steps, 0.0, highest, MIDDLE, TOP, colour)
        parts.append(f'<line x1="{x}" y1="34" x2="{x + 22}" y2="34" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 28}" y="38">{name}</text>')
    for line in powers.values():
        parts += _lines(line, steps, low, max(low + 1, top), BOTTOM, BELOW, COLOURS[3])
    return "\n".join([*parts, "</svg>"]) + "\n"


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text class="quiet" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _lines(
    line: Sequence[float | None], steps: int, low: float, high: float, bottom: int, top: int, colour: str
) -> list[str]:
    parts: list[list[str]] = [[]]
    for number, value in enumerate(line, 1):
        if value is None:
            parts.append([])
            continue
        x = LEFT + (WIDTH - LEFT - RIGHT) * number / steps
        parts[-1].append(f"{x:.1f},{bottom - (bottom - top) * (value - low) / (high - low):.1f}")
    return [f'<polyline stroke="{colour}" points="{" ".join(part)}"/>' for part in parts if part]
