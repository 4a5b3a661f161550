"""Memory against time: every side as a line through its settings, as an SVG for light and dark ground."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from glm_accelerate.observe.picture import STYLE

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 24, 60, 56
COLOURS = ("#1f6fb5", "#c2410c", "#15803d", "#7c3aed")


@dataclass(frozen=True)
class Line:
    """(memory, time) of each setting, both as parts of nothing recomputed; one point is a dot."""

    name: str
    points: tuple[tuple[float, float], ...]


def picture(lines: Sequence[Line], title: str, aim: tuple[float, float]) -> str:
    """`aim`: what memory and time are to stay under, drawn as a corner."""
    times = [time for line in lines for _, time in line.points]
    low, high = min(1.0, *times) - 0.05, max(aim[1], *times) + 0.05

    def x(memory: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * memory / 1.1

    def y(time: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - time) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<text x="{LEFT}" y="24" font-size="16" font-weight="600">{escape(title)}</text>',
        f'<rect x="{x(0):.1f}" y="{y(aim[1]):.1f}" width="{x(aim[0]) - x(0):.1f}" '
        f'height="{y(low) - y(aim[1]):.1f}" fill="#15803d" opacity="0.12"/>',
    ]
    parts += [_upright(x(step / 10), f"{10 * step} %") for step in range(12)]
    parts += [_level(y(step / 10), f"{10 * step} %") for step in range(int(low * 10) + 1, int(high * 10) + 1)]
    for number, line in enumerate(lines):
        parts += _drawn(line, [(x(memory), y(time)) for memory, time in line.points], number)
    middle, centre = (TOP + HEIGHT - BOTTOM) / 2, (LEFT + WIDTH - RIGHT) / 2
    parts += [
        f'<text x="{centre}" y="{HEIGHT - 14}" text-anchor="middle">memory of a pass</text>',
        f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">time</text>',
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _upright(x: float, said: str) -> str:
    bottom = HEIGHT - BOTTOM
    return (
        f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}"/>'
        f'<text class="quiet" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{said}</text>'
    )


def _level(y: float, said: str) -> str:
    return (
        f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>'
        f'<text class="quiet" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{said}</text>'
    )


def _drawn(line: Line, places: Sequence[tuple[float, float]], number: int) -> list[str]:
    colour = COLOURS[number % len(COLOURS)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    legend = LEFT + 150 * number
    return [
        f'<polyline points="{path}" stroke="{colour}" stroke-width="2" fill="none"/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in places),
        f'<circle cx="{legend}" cy="44" r="5" fill="{colour}"/>',
        f'<text x="{legend + 10}" y="48">{escape(line.name)}</text>',
    ]
