import math
from xml.etree import ElementTree

import pytest

from glm_accelerate.observe.chart import (
    Bar,
    bars,
    escaped,
    losses,
    opening,
    smoothed,
    sparkline,
    ticks,
)
from glm_accelerate.observe.events import Event

EVENTS: list[Event] = [
    *({"kind": "step", "step": step, "loss": 8 / step} for step in range(1, 1001)),
    {"kind": "step", "step": 1001, "loss": None},
    {"kind": "eval", "step": 1000, "loss": 0.5},
    {"kind": "eval", "step": 0, "loss": 8.0},
    {"kind": "checkpoint", "step": 500},
]


@pytest.mark.parametrize("around", [0.0, -7.0, 1e15])
def test_figures_that_are_all_alike_have_an_axis(around: float) -> None:
    marks = ticks(around, around)
    assert marks[0] <= around <= marks[-1]
    assert marks[0] < marks[-1]


def test_the_running_mean() -> None:
    points = [(float(step), float(step * step)) for step in range(5)]
    assert [mean for _, mean in smoothed(points, 1)] == [1 / 2, 5 / 3, 14 / 3, 29 / 3, 25 / 2]
    assert smoothed(points, 0) == points


@pytest.mark.parametrize(
    ("lowest", "highest", "marks"),
    [
        (0, 8, [0, 2, 4, 6, 8]),
        (1.36, 1.84, [1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9]),
        (0.98, 1.02, [0.98, 0.99, 1.0, 1.01, 1.02]),
    ],
)
def test_marks_are_round_and_enclose_everything(lowest: float, highest: float, marks: list[float]) -> None:
    assert ticks(lowest, highest) == marks


def test_nobodys_text_breaks_a_picture() -> None:
    name = "</text><script>\x01\udcff & 'a' \"b\" " + "long " * 40
    root = ElementTree.fromstring("".join(opening(name)) + "</svg>")
    title, shown = (root.find(f"{{http://www.w3.org/2000/svg}}{tag}") for tag in ("title", "text"))
    assert title is not None and title.text == name.replace("\x01", "?").replace("\udcff", "?")  # noqa: PT018
    assert shown is not None and shown.text is not None and len(shown.text) == 42  # noqa: PT018
    assert "<" not in escaped(name)


def test_the_longest_bar_fills_the_width_and_nothing_overflows() -> None:
    items = [Bar("x", 4.0, "4"), Bar("y", 1.0, "1"), Bar("<&>", 0.0, "0")]
    root = ElementTree.fromstring(bars(items, "<&>"))
    spans = [
        (float(node.attrib["x"]), float(node.attrib["width"]))
        for node in root.iter("{http://www.w3.org/2000/svg}rect")
    ]
    whole = float(root.attrib["viewBox"].split()[2])
    assert [width for _, width in spans] == sorted((width for _, width in spans), reverse=True)
    assert spans[0][1] == pytest.approx(4 * spans[1][1])
    assert all(x > 0 and x + width < whole for x, width in spans)


def test_losses_are_in_order_and_finite() -> None:
    assert losses(EVENTS, "eval") == [(0.0, 8.0), (1000.0, 0.5)]
    assert len(losses(EVENTS, "step")) == 1000


def test_a_sparkline_falls_with_its_values() -> None:
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1]) == "█▇▆▅▄▃▂▁"
    assert sparkline([1.0] * 100, width=10) == "▁" * 10
    assert sparkline([]) == ""
    long = sparkline([math.exp(-step / 50) for step in range(1000)], width=30)
    assert (len(long), long[0], long[-1]) == (30, "█", "▁")
