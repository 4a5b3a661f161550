"""What evaluations decide about training, at the step where they decide and nowhere else."""

import pytest

from glm_accelerate.config.schema import EvaluateSection
from glm_accelerate.evaluate.protocol.history import EvaluationHistory
from glm_accelerate.evaluate.statistics.decide import ScoredStep
from glm_accelerate.training.decisions import Decisions

EXAM, OTHER = "0123abcd", "89ef0123"
NO_GAIN = {step: ScoredStep(step, 2.0, "done") for step in range(0, 60, 10)}


def decisions(scored: dict[int, ScoredStep], **section: int) -> Decisions:
    history = EvaluationHistory([*NO_GAIN], scored, EXAM)
    return Decisions(EvaluateSection.model_validate(section), history, lag=20)


def decide(made: Decisions, position: int) -> list[str]:
    due = made.due(position)
    if due is None:
        return []
    conclusions, sentences = made.conclude(due, position)
    made.apply(conclusions)
    return sentences


def test_a_result_decides_a_fixed_number_of_steps_after_its_own() -> None:
    made = decisions(NO_GAIN, stop_after=2)
    assert [decide(made, position) for position in range(40)] == [[]] * 40
    assert decide(made, 40) == ["stop: no gain in 2 evaluations up to step 20; overshoot 20 steps"]
    assert made.stopped == "no gain in 2 evaluations up to step 20"
    assert made.due(60) is None  # nothing is left to decide


def test_nothing_is_decided_twice() -> None:
    made = decisions(NO_GAIN, lower_rate_after=1)
    assert [len(decide(made, position)) for position in (30, 31, 39, 40, 40)] == [1, 0, 0, 1, 0]
    assert (made.lowered, made.history.decided) == (2, 20)


@pytest.mark.parametrize("decided", [-1, 20])
def test_a_resumed_run_stands_where_it_was(decided: int) -> None:
    made = decisions(NO_GAIN, stop_after=2, lower_rate_after=1)
    made.history.decided = decided
    assert not made.resume(EXAM, 35)
    assert (made.lowered, made.stopped is None) == ((0, True) if decided < 0 else (2, False))


def test_another_exam_begins_anew_with_the_rate_as_it_is() -> None:
    made = decisions(dict(NO_GAIN), stop_after=2, lower_rate_after=1)
    made.history.decided = 20
    assert made.resume(OTHER, 35)
    assert (made.lowered, made.stopped) == (2, None)
    assert made.history == EvaluationHistory([35], {}, OTHER, -1, 2)


def test_without_a_wish_nothing_is_ever_due() -> None:
    assert decisions(NO_GAIN).due(1000) is None


def test_the_history_keeps_its_names_in_files() -> None:
    made = decisions(NO_GAIN).history
    content = made.to_json()
    assert list(content) == ["asked", "judged", "plan", "told", "lowered"]
    assert EvaluationHistory.from_json(content) == made
    first = {name: content[name] for name in ("asked", "judged")}  # what the first checkpoints have
    assert EvaluationHistory.from_json(first) == EvaluationHistory(made.requested, made.scored)
