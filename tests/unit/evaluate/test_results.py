"""Results on disk: strict JSON, whole or not there, and the highest attempt wins."""

import json
import os
from dataclasses import replace

import pytest

from glm_accelerate.evaluate.results import Result, plan_hash, read_results, write_result
from glm_accelerate.evaluate.score import Prediction
from glm_accelerate.runtime.errors import UserError

RESULT = Result(
    step=300, plan="0a1b2c3d", attempt=1, status="done", loss=2.5, ci95=(2.25, 2.75), samples=64, total=1000,
    metrics={"exact_match": 0.5}, seconds=1.5, intervals={"exact_match": (0.4, 0.6)},
)  # fmt: skip
CASES = (Prediction("问\n", "好", "好", True), Prediction("q\u2028", "yes", "no", False))


def test_what_was_written_is_read(tmp_path):
    path = write_result(tmp_path, RESULT, CASES)
    assert path == tmp_path / "evals" / "300-0a1b2c3d-1.json"
    assert read_results(tmp_path) == {300: RESULT}
    lines = path.with_name("300-0a1b2c3d-1.predictions.jsonl").read_text(encoding="utf-8").split("\n")
    assert [json.loads(line) for line in lines[:-1]] == [
        {"prompt": "问\n", "reference": "好", "answer": "好", "right": True},
        {"prompt": "q\u2028", "reference": "yes", "answer": "no", "right": False},
    ]
    assert "好" in lines[0]  # readable
    assert sorted(os.listdir(tmp_path / "evals")) == [path.stem + ".json", path.stem + ".predictions.jsonl"]


def test_the_event_has_the_fields_of_the_contract():
    assert " ".join(RESULT.event()) == "step status loss ci95 samples total metrics seconds"
    failed = replace(RESULT, status="failed", loss=None, ci95=None, reason="out of memory")
    assert failed.event() | {"reason": "out of memory"} == failed.event()
    assert json.loads(json.dumps(failed.event(), allow_nan=False))["loss"] is None


def test_the_highest_attempt_wins_whatever_came_last(tmp_path):
    write_result(tmp_path, replace(RESULT, attempt=10, loss=1.0))
    write_result(tmp_path, replace(RESULT, attempt=9, loss=9.0))
    write_result(tmp_path, replace(RESULT, step=100))
    results = read_results(tmp_path)
    assert list(results) == [100, 300]
    assert results[300].loss == 1.0


def test_made_again_it_replaces_itself(tmp_path):
    write_result(tmp_path, RESULT, CASES)
    write_result(tmp_path, replace(RESULT, loss=2.0), CASES[:1])
    assert read_results(tmp_path)[300].loss == 2.0
    assert len(list((tmp_path / "evals").iterdir())) == 2


def test_nan_is_never_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write_result(tmp_path, replace(RESULT, loss=float("nan")))
    assert list((tmp_path / "evals").iterdir()) == []


def test_what_is_not_a_result(tmp_path):
    assert read_results(tmp_path) == {}
    folder = write_result(tmp_path, RESULT).parent
    (folder / ".400-0a1b2c3d-1.json.abc").write_text("{")  # left by a kill
    (folder / "notes.json").write_text("mine")
    assert read_results(tmp_path) == {300: RESULT}
    (folder / "400-0a1b2c3d-1.json").write_text('{"step": 400}')
    with pytest.raises(UserError, match=r"400-0a1b2c3d-1\.json: not a result"):
        read_results(tmp_path)


def test_a_plan_is_named_by_what_it_asks():
    assert plan_hash({"a": 1, "b": [2]}) == plan_hash({"b": [2], "a": 1})
    assert plan_hash({"a": 1}) != plan_hash({"a": 2})
