"""Requests and results as words: what is written reads back, what is broken or foreign is named."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest

from glm_accelerate.evaluate.protocol.messages import (
    Comparison,
    EvaluationResult,
    Request,
    exam_id_of,
    full_exam_id,
    parse_request,
    parse_result,
    parse_stem,
    to_json,
    with_finite_numbers,
)
from glm_accelerate.runtime.errors import UserError

EXAM = "0123abcd"
COMPARED = Comparison(2, f"2-{EXAM}-1", -0.02, (-0.03, -0.01), "better", 2, 4)
FULL = EvaluationResult(
    step=3,
    exam_id=EXAM,
    attempt=1,
    status="done",
    loss=2.25,
    ci95=(2.0, 2.5),
    samples=100,
    total=400,
    metrics={"bleu": 12.5},
    intervals={"bleu": (10.0, 15.0)},
    seconds=1.5,
    against=COMPARED,
    by={"device": "cpu"},
)


def test_what_is_written_reads_back() -> None:
    assert to_json(FULL)["plan"] == EXAM  # its name in files
    assert parse_result(json.dumps(to_json(FULL)), Path(f"3-{EXAM}-1.json")) == FULL
    request = Request(3, EXAM, 1, "snapshots/snapshot-3", against=FULL.stem, whole=True)
    assert parse_request(json.dumps(to_json(request)), Path(f"3-{EXAM}-1.asked.json")) == request


def test_a_result_of_an_earlier_version_reads() -> None:
    said = to_json(FULL)
    del said["against"], said["by"]
    assert parse_result(json.dumps(said), Path(f"3-{EXAM}-1.json")).loss == 2.25


def test_what_a_newer_version_added_is_not_read() -> None:
    said = {**to_json(FULL), "perplexity": 9.0}
    assert parse_result(json.dumps(said), Path(f"3-{EXAM}-1.json")) == FULL


@pytest.mark.parametrize(
    "change",
    [
        {"loss": "2.25"},
        {"status": "fine"},
        {"step": 3.5},
        {"ci95": [1.0]},
        {"metrics": {"bleu": None}},
        {"metrics": [1]},
        {"step": 4},
        {"attempt": 2},
        {"plan": None},
    ],
)
def test_a_result_that_is_broken_or_anothers_is_named(change: dict[str, object]) -> None:
    path = Path(f"evals/3-{EXAM}-1.json")
    with pytest.raises(UserError, match=f"evals/3-{EXAM}-1.json"):
        parse_result(json.dumps({**to_json(FULL), **change}), path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"step": 3, "step": 3}', '{"loss": NaN}'])
def test_what_is_no_result_is_named(text: str) -> None:
    with pytest.raises(UserError, match="move it away"):
        parse_result(text, Path(f"3-{EXAM}-1.json"))


@pytest.mark.parametrize("weights", ["/etc", "../other/snapshots/snapshot-3", "snapshots/../../x"])
def test_weights_lie_in_the_run(weights: str) -> None:
    text = json.dumps(to_json(Request(3, EXAM, 1, weights)))
    with pytest.raises(UserError, match="outside the run"):
        parse_request(text, Path(f"3-{EXAM}-1.asked.json"))


@pytest.mark.parametrize(
    "name",
    ["03-0123abcd-1", "3-0123ABCD-1", "3-0123abc-1", "3-0123abcd-01", "3-0123abcd-1 ", "３-0123abcd-1", "-1"],
)
def test_only_exact_names_are_names(name: str) -> None:
    assert parse_stem("3-0123abcd-1") == (3, "0123abcd", 1)
    assert parse_stem(name) is None


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_a_failure(loss: float) -> None:
    said = with_finite_numbers(
        EvaluationResult(3, EXAM, 1, "done", loss=loss, ci95=(loss, loss), metrics={"bleu": 1.0})
    )
    assert (said.status, said.loss, said.ci95, said.metrics) == ("failed", None, None, {"bleu": 1.0})
    assert said.reason is not None
    assert str(loss) in said.reason


def test_a_metric_that_is_no_number_is_left_out_and_named() -> None:
    """A user's own metric may give anything."""
    odd = {"nan": math.nan, "text": "good", "none": None, "truth": True, "right": 0.5}
    intervals = {"nan": (0.0, 1.0), "right": (0.25, math.inf)}
    said = with_finite_numbers(
        EvaluationResult(3, EXAM, 1, "done", loss=2.0, metrics=odd, intervals=intervals)
    )  # pyright: ignore[reportArgumentType]
    assert (said.status, said.loss, said.metrics, said.intervals) == ("done", 2.0, {"right": 0.5}, {})
    assert said.reason is not None
    assert all(name in said.reason for name in ("nan", "none", "text", "truth"))


def test_an_event_says_what_matters() -> None:
    assert FULL.event()["against"] == asdict(COMPARED)
    assert "reason" not in FULL.event()
    assert EvaluationResult(3, EXAM, 1, "skipped", reason="late").event()["reason"] == "late"


def test_an_exam_is_named_by_its_content() -> None:
    assert exam_id_of({"a": 1, "b": [2]}) == exam_id_of({"b": [2], "a": 1}) != exam_id_of({"a": 1, "b": [3]})
    assert parse_stem(f"3-{full_exam_id(EXAM)}-1") is not None
    assert full_exam_id(EXAM) != EXAM
