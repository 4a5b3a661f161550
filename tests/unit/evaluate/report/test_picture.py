import re
from collections.abc import Collection
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from glm_accelerate.evaluate.protocol.messages import EvaluationResult
from glm_accelerate.evaluate.report.picture import held_out_curve
from glm_accelerate.evaluate.statistics.decide import Status
from glm_accelerate.observe.chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH

SVG = "{http://www.w3.org/2000/svg}"


def result(
    step: int, loss: float | None, half: float | None = 0.03, status: Status = "done"
) -> EvaluationResult:
    ci95 = None if loss is None or half is None else (loss - half, loss + half)
    return EvaluationResult(step, "0" * 8, 1, status, loss=loss, ci95=ci95, samples=500, total=4000)


def drawn(
    *results: EvaluationResult, best: int | None = None, gains: Collection[int] = range(9999)
) -> ElementTree.Element:
    train = [(float(step), 2.0 - step / 1000) for step in range(1, 1001)]
    return ElementTree.fromstring(held_out_curve(train, results, gains, best, "Evaluations of a & <b>"))


def of_class(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [element for element in root.iter() if name in (element.get("class") or "").split()]


def points(element: ElementTree.Element) -> list[tuple[float, float]]:
    x_and_y = [pair.split(",") for pair in element.get("points", "").split()]
    return [(float(x), float(y)) for x, y in x_and_y]


def test_each_loss_lies_within_its_interval_and_all_within_the_frame() -> None:
    root = drawn(result(0, 2.0), result(500, 1.6), result(1000, 1.5))
    (held,), (band,) = of_class(root, "held")[:1], of_class(root, "band")
    line, around = points(held), points(band)
    assert [x for x, _ in line] == [LEFT, (LEFT + WIDTH - RIGHT) / 2, WIDTH - RIGHT]
    for index, (x, y) in enumerate(line):
        (high_x, high), (low_x, low) = around[index], around[len(around) - 1 - index]
        assert high_x == low_x == x
        assert TOP <= high < y < low <= HEIGHT - BOTTOM  # a higher loss is further up
    assert len(of_class(root, "whisker")) == len(of_class(root, "dot")) == 3
    words = {text.text for text in root.iter(f"{SVG}text")}
    assert {"step", "loss (nats a token)", "training", "held out, 95 %", "0", "1,000"} <= words


def test_what_found_nothing_stands_on_the_floor_and_in_the_legend() -> None:
    root = drawn(
        result(0, 2.0),
        result(250, None, status="skipped"),
        result(500, None, status="timeout"),
        result(750, 1.5),
    )
    hollow, crosses = of_class(root, "missed"), of_class(root, "broken")
    assert (float(hollow[0].get("cx", "")), float(hollow[0].get("cy", ""))) == (
        LEFT + 0.25 * (WIDTH - LEFT - RIGHT),
        348,
    )
    assert [len(hollow), len(crosses)] == [2, 2]  # the second of each explains the first
    assert {"skipped", "timeout"} <= {text.text for text in root.iter(f"{SVG}text")}
    assert len(points(of_class(root, "held")[0])) == 2


def test_steps_without_gain_are_hollow() -> None:
    root = drawn(result(0, 2.0), result(500, 2.1), gains=[0])
    assert (len(of_class(root, "dot")), len(of_class(root, "level"))) == (1, 2)  # one of them is the legend's
    assert "no gain" in {text.text for text in root.iter(f"{SVG}text")}


def test_the_best_is_ringed_and_named_within_the_picture() -> None:
    root = drawn(result(0, 2.0), result(1000, 1.5), best=1000)
    (ring, beside_name), (name,) = of_class(root, "ring"), of_class(root, "praise")
    held = points(of_class(root, "held")[0])
    assert (float(ring.get("cx", "")), float(ring.get("cy", ""))) == held[1]
    assert name.text == "best: step 1,000, 1.500 ±0.030"
    assert HEIGHT - BOTTOM < float(name.get("y", "")) < HEIGHT  # where no line runs
    assert LEFT < float(beside_name.get("cx", "")) < float(name.get("x", ""))
    assert not of_class(drawn(result(0, 2.0), best=500), "ring")  # it is not among them


def test_losses_of_the_beginning_far_above_the_later_half_are_cut_off_and_the_first_is_said() -> None:
    later = [result(step, 1.5 - step / 10_000) for step in (250, 500, 750, 1000)]
    root = drawn(result(0, 10.25), result(100, 5.5), *later)
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert "10.25" in texts
    assert "5.5" not in texts
    assert sum(element.tag == f"{SVG}circle" for element in of_class(root, "dot")) == 4
    assert all(y > TOP for _, y in points(of_class(root, "held")[0])[2:])  # the others have the whole height
    for low in ([result(0, 0.1), *later], [*later, result(1100, 9.0)]):  # what comes after is news, and shown
        _, *ys = [y for _, y in points(of_class(drawn(*low), "held")[0])]
        assert all(TOP <= y <= HEIGHT - BOTTOM for y in ys)


@pytest.mark.parametrize(
    "results",
    [
        [],
        [result(0, 2.0, None)],
        [result(0, 0.0, 0.0)],
        [result(5, None, status="failed")],
        [result(step, 2.0, 0.0) for step in range(0, 1000, 10)],
    ],
)
def test_any_run_has_a_picture(results: list[EvaluationResult]) -> None:
    svg = held_out_curve([], results, [], 0, "x")
    ElementTree.fromstring(svg)
    assert not re.search(r"nan|inf\b", svg)


def test_the_end_of_the_training_curve_and_most_evaluations_are_shown() -> None:
    """A run that learns its data by heart: trained to 0.02, while the held-out loss rises again."""
    train = [(float(step), max(0.02, 6 - step / 50)) for step in range(1, 1001)]
    held = [result(0, 5.9), result(100, 0.8), *(result(step, 0.45, 0.0) for step in range(200, 1001, 100))]
    root = ElementTree.fromstring(held_out_curve(train, held, [], 200, "x"))
    curve, ys = points(of_class(root, "train")[0]), [y for _, y in points(of_class(root, "held")[0])]
    assert all(TOP <= y <= HEIGHT - BOTTOM for y in [*(y for x, y in curve if x > WIDTH / 2), *ys[2:]])
    assert ys[0] < TOP
    assert ys[2] < (TOP + HEIGHT - BOTTOM) / 2  # they have most of the height


def test_noise_makes_no_mountains_and_no_interval_is_promised_where_there_is_none() -> None:
    held = [result(step, 5.6 + step % 200 / 1e6, None) for step in range(0, 1000, 100)]
    root = ElementTree.fromstring(held_out_curve([], held, [], 0, "x"))
    ys = [y for _, y in points(of_class(root, "held")[0])]
    assert max(ys) - min(ys) < 1
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert "held out" in texts
    assert "held out, 95 %" not in texts
    below = [replace(result(0, 0.5), ci95=(-0.4, 2.0))]
    band = of_class(ElementTree.fromstring(held_out_curve([], below, [], 0, "x")), "band")
    assert max(y for _, y in points(band[0])) <= HEIGHT - BOTTOM  # no loss lies below zero


def test_many_evaluations_have_a_band_and_no_fence() -> None:
    root = drawn(*(result(step, 1.5) for step in range(0, 1000, 10)))
    assert not of_class(root, "whisker")
    assert of_class(root, "band")
