"""What the trainer requests of evaluators: the same whenever they answer, and nothing of another exam."""

from pathlib import Path

import pytest

from glm_accelerate.config.schema import EvaluateSection
from glm_accelerate.evaluate.protocol import ledger
from glm_accelerate.evaluate.protocol.history import EvaluationHistory
from glm_accelerate.evaluate.protocol.messages import Request, full_exam_id
from glm_accelerate.evaluate.protocol.requests import Requests
from glm_accelerate.evaluate.statistics.decide import ScoredStep

EXAM, OTHER = "0123abcd", "89ef0123"


def requests(run: Path, history: EvaluationHistory, *, lag: int) -> Requests:
    section = EvaluateSection(stop_after=3) if lag else EvaluateSection()
    made = Requests(run=run, exam_id=EXAM, section=section, history=history, lag=lag, attempt=2)
    made.resume(first=True)
    return made


@pytest.mark.parametrize("answered", range(1, 10))
def test_a_late_evaluator_finds_the_weights_to_compare_with(answered: int, tmp_path: Path) -> None:
    """A falling loss, every step a gain: each is compared with the one five before it, however many later
    ones were better by the time it is asked.
    """
    losses = {step: ScoredStep(step, 3.0 - step / 10, "done") for step in range(9)}
    late = EvaluationHistory(list(range(9)), {step: losses[step] for step in range(answered)})
    position, made = 8, requests(tmp_path, late, lag=5)
    wanted = made.baselines(position)
    for step in [*late.pending, *range(position + 1, 20)]:
        made.attempts[step] = 2
        request = made.for_step(step)
        if step - 5 < answered:  # else it is asked later
            assert request.against_weights == f"snapshots/snapshot-{step - 5}" or step < 5
            assert step < 5 or step - 5 in wanted
    assert min(wanted) == max(0, min(answered, 9) - 5)  # no more than that


def test_requests_of_another_exam_are_withdrawn(tmp_path: Path) -> None:
    """Their evaluators are gone, and those of this exam would refuse them."""
    exams = (EXAM, full_exam_id(EXAM), OTHER, full_exam_id(OTHER))
    for exam_id in exams:
        ledger.post(tmp_path, Request(3, exam_id, 1, "snapshots/snapshot-3"))
    requests(tmp_path, EvaluationHistory(), lag=0)
    assert {request.exam_id for request in ledger.waiting(tmp_path)} == {EXAM, full_exam_id(EXAM)}
    assert {(result.exam_id, result.status, result.reason) for result in ledger.results(tmp_path)} == {
        (exam_id, "skipped", "attempt 2 asks otherwise") for exam_id in exams[2:]
    }
