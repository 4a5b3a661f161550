"""What the trainer asks of evaluators: the same whenever they answer, and nothing under another plan."""

from pathlib import Path

import pytest

from glm_accelerate.config.schema import EvaluateSection
from glm_accelerate.evaluate.protocol import ledger
from glm_accelerate.evaluate.protocol.messages import Request, whole_plan
from glm_accelerate.evaluate.statistics.decide import Judged
from glm_accelerate.train.asked import Asked
from glm_accelerate.train.state import Judging

PLAN, OTHER = "0123abcd", "89ef0123"


def asked(run: Path, judging: Judging, *, lag: int) -> Asked:
    section = EvaluateSection(stop_after=3) if lag else EvaluateSection()
    made = Asked(run=run, plan=PLAN, section=section, judging=judging, lag=lag, attempt=2)
    made.remember()
    return made


@pytest.mark.parametrize("answered", range(1, 10))
def test_a_late_evaluator_finds_the_weights_to_compare_with(answered: int, tmp_path: Path) -> None:
    """A falling loss, every step a gain: each is compared with the one five before it, however many later
    ones were better by the time it is asked.
    """
    losses = {step: Judged(step, 3.0 - step / 10, "done") for step in range(9)}
    late = Judging(list(range(9)), {step: losses[step] for step in range(answered)})
    position, made = 8, asked(tmp_path, late, lag=5)
    wanted = made.compared(position)
    for step in [*late.pending, *range(position + 1, 20)]:
        made.attempts[step] = 2
        request = made.request(step)
        if step - 5 < answered:  # else it is asked later
            assert request.against_weights == f"snapshots/snapshot-{step - 5}" or step < 5
            assert step < 5 or step - 5 in wanted
    assert min(wanted) == max(0, min(answered, 9) - 5)  # no more than that


def test_what_was_asked_under_another_plan_is_answered(tmp_path: Path) -> None:
    """Its evaluators are gone, and those of this plan would refuse it."""
    plans = (PLAN, whole_plan(PLAN), OTHER, whole_plan(OTHER))
    for plan in plans:
        ledger.ask(tmp_path, Request(3, plan, 1, "snapshots/snapshot-3"))
    asked(tmp_path, Judging(), lag=0).answer_others()
    assert {request.plan for request in ledger.waiting(tmp_path)} == {PLAN, whole_plan(PLAN)}
    assert {(result.plan, result.status, result.reason) for result in ledger.results(tmp_path)} == {
        (plan, "skipped", "attempt 2 asks otherwise") for plan in plans[2:]
    }
