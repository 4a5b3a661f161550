import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from glm_accelerate.evaluate.protocol.history import latest_by_step, main_exam
from glm_accelerate.evaluate.protocol.ledger import post, publish
from glm_accelerate.evaluate.protocol.messages import (
    Comparison,
    EvaluationResult,
    Findings,
    Prediction,
    Request,
    full_exam_id,
)
from glm_accelerate.evaluate.report.page import best_so_far, report
from glm_accelerate.observe.events import strict_json
from glm_accelerate.runtime.errors import UserError

PLAN = "0123abcd"
WHOLE = full_exam_id(PLAN)


def result(step: int, loss: float | None = None, **said: Any) -> EvaluationResult:
    made = EvaluationResult(step, PLAN, 1, "done", loss=loss, samples=128, total=400, seconds=12.04)
    return replace(made, ci95=None if loss is None else (loss - 0.05, loss + 0.05), **said)


def against(step: int, difference: float) -> Comparison:
    interval = (difference - 0.01, difference + 0.01)
    return Comparison(step, f"{step}-{PLAN}-1", difference, interval, "better", 1, 4)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """write(results, predictions by step, events, files) -> a run's directory."""

    def make(
        results: list[EvaluationResult],
        said: Mapping[int, list[Prediction]] | None = None,
        events: list[dict[str, Any]] | None = None,
        name: str = "run",
    ) -> Path:
        run = tmp_path / name
        run.mkdir()
        for one in results:
            assert publish(run, Findings(one, None, (said or {}).get(one.step, [])))
        lines = [strict_json({"time": 0.0, "attempt": 1, **event}) for event in events or []]
        (run / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return run

    return make


def rows(page: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in page.splitlines()
        if line.startswith("| ")
    ]


def test_every_evaluation_has_a_line_with_what_it_found_or_why_not(write: Callable[..., Path]) -> None:
    run = write(
        [
            result(0, 2.5, by={"where": "beside", "device": "cuda:1", "host": "a|b"}),
            replace(result(100), status="skipped", samples=0, seconds=0.0, reason="step 200 is newer"),
            result(
                200, 2.25, against=against(0, -0.25), metrics={"bleu": 31.4}, intervals={"bleu": (30.0, 33.0)}
            ),
            replace(result(300), status="failed", samples=0, seconds=0.0, reason="out of memory:\n| CPU"),
        ]
    )
    page = report(run).read_text()
    head, *lines = rows(page)
    assert head == [
        "step",
        "loss",
        "95 % interval",
        "samples",
        "against",
        "bleu",
        "seconds",
        "where",
        "status",
    ]
    assert lines == [
        ["0", "2.500", "2.4500 to 2.5500", "128 of 400", "", "", "12.0", "beside cuda:1 a\\|b", "done"],
        ["100", "", "", "", "", "", "", "", "skipped: step 200 is newer"],
        ["200", "2.250", "2.2000 to 2.3000", "128 of 400", "-0.2500 against 0: better", "31.4 (30.0 to 33.0)",
         "12.0", "", "done"],
        ["300", "", "", "", "", "", "", "", "failed: out of memory: \\| CPU"],
    ]  # fmt: skip
    assert (
        "**So far: step 200** (training has not taken it over yet), loss 2.250 ±0.050, on 128 of 400 "
        "held-out samples: enough to compare steps" in page
    )
    picture = ElementTree.parse(run / "evals" / "report.svg").getroot()
    assert "so far: step 200, 2.250 ±0.050" in {"".join(text.itertext()) for text in picture.iter()}


def test_the_best_is_the_one_that_the_trainer_named(write: Callable[..., Path]) -> None:
    run = write([result(0, 2.5), result(100, 2.3), result(200, 2.29)])
    (run / "best").write_text("snapshots/snapshot-100\n")
    assert "**Best: step 100**," in report(run).read_text()


def test_what_was_no_better_than_the_best_before_it_is_hollow(write: Callable[..., Path]) -> None:
    """Whatever it was compared with: 300 was asked while 100 was the best; 200 was better still."""
    run = write(
        [
            result(100, 2.5),
            result(200, 2.2, against=against(100, -0.3)),
            result(300, 2.4, against=against(100, -0.1)),
            result(400, 2.1, against=against(200, -0.1)),
        ]
    )
    root = ElementTree.parse(report(run).with_suffix(".svg")).getroot()
    hollow = [element for element in root.iter() if element.get("class") == "level"]
    assert [next(element.itertext(), None) for element in hollow] == ["step 300: 2.400 ±0.050", None]
    assert best_so_far(run) == ""
    (run / "best").write_text("snapshots/snapshot-400\n")
    assert best_so_far(run) == " · best: step 400, loss 2.100 ±0.050 (128 of 400)"


def test_finalists_have_a_table_of_their_own(write: Callable[..., Path]) -> None:
    finalists = [result(step, loss, exam_id=WHOLE, samples=400) for step, loss in ((100, 2.31), (200, 2.32))]
    run = write([result(0, 2.5), result(100, 2.3), result(200, 2.29), *finalists])
    (run / "best").write_text("checkpoints/checkpoint-100\n")
    page = report(run).read_text()
    assert page.index("## What was measured") < page.index("## The finalists, on all held-out samples")
    assert "**Best: step 100**, loss 2.310 ±0.050, on all 400 held-out samples." in page
    assert [row[0] for row in rows(page)] == ["step", "0", "100", "200", "step", "100", "200"]


def test_all_samples_of_other_questions_are_no_finalists(write: Callable[..., Path]) -> None:
    before = [result(step, 2.5, exam_id="fedcba98", samples=400) for step in (0, 100)]
    page = report(write([*before, result(200, 2.3, attempt=2), result(300, 2.2, attempt=2)])).read_text()
    assert "## Other questions (fedcba98)" in page
    assert "finalists" not in page


def test_the_curve_is_of_what_the_latest_attempt_was_asked() -> None:
    before = [result(step, 2.0, exam_id=WHOLE) for step in (0, 100, 200)]
    after = [result(step, 3.0, attempt=2) for step in (200, 300)]
    assert main_exam([*before, *after]) == PLAN
    again = [result(200, 2.0), replace(result(200, 1.5), attempt=2), replace(result(300), status="timeout")]
    late = replace(result(300, 1.0), attempt=2)
    assert [(one.step, one.loss) for one in latest_by_step([late, *again])] == [(200, 1.5), (300, 1.0)]


def test_decisions_and_what_it_cost(write: Callable[..., Path]) -> None:
    events = [
        *({"kind": "step", "step": step, "loss": 2.0, "seconds": 0.1} for step in range(1, 201)),
        {"kind": "snapshot", "step": 100, "blocked_seconds": 0.05},
        {"kind": "snapshot", "step": 200, "blocked_seconds": 0.15},
        {"kind": "decision", "step": 200, "said": "stop: no gain in 3 evaluations <since> step 100"},
    ]
    page = report(write([result(0, 2.5)], events=events)).read_text()
    assert "- step 200: stop: no gain in 3 evaluations \\<since\\> step 100" in page
    assert "It waited 0.20 s for 2 snapshots, at most 0.15 s for one: 0.99% of 20 s." in page


def test_inline_the_evaluation_itself_is_the_cost(write: Callable[..., Path]) -> None:
    events = [
        {"kind": "step", "step": 1, "loss": 2.0, "seconds": 6.0},
        {"kind": "eval", "step": 1, "seconds": 2.0},
    ]
    run = write([result(1, 2.5)], events=events)
    (run / "plan.json").write_text(json.dumps({"evaluate_where": "inline"}))
    assert (
        "It waited 2.00 s for 1 evaluations, at most 2.00 s for one: 25.00% of 8 s."
        in report(run).read_text()
    )


def test_answers_of_the_best_and_the_last_step_cannot_leave_their_block(write: Callable[..., Path]) -> None:
    def says(answer: str) -> list[Prediction]:
        return [Prediction("x" * 5000 + "</script>|Question", "right", answer, {"exact_match": 0.0})] * 5

    trick = "```\n# not a heading\x1b[31m\n````"
    run = write(
        [result(0, 2.5), result(100, 2.1), result(200, 2.2)], {100: says(trick), 200: says("y" * 2000)}
    )
    page = report(run).read_text()
    assert page.count("### Question") == 3
    assert (
        "step 100 (best), exact\\_match 0.000:\n\n`````text\n```\n# not a heading�[31m\n````\n`````" in page
    )
    assert "step 200, exact\\_match 0.000:\n\n```text\n" + "y" * 700 + " …\n```" in page
    assert "\n… " + "x" * 682 + "</script>|Question\n" in page


def test_what_waits_and_what_cannot_be_read_is_said(write: Callable[..., Path]) -> None:
    run = write([result(0, 2.5)])
    post(run, Request(1300, PLAN, 1, "snapshots/snapshot-1300"))
    (run / "evals" / f"7-{PLAN}-1.json").write_text('{"step": 7')
    page = report(run).read_text()
    assert "Asked and not answered yet: steps 1,300." in page
    assert "passed over: " in page


def test_a_run_that_was_never_evaluated_says_how_to(write: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match=r"nothing was evaluated.*data\.dev"):
        report(write([]))
