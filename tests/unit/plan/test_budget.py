"""How often evaluations come for a share of the time: more of them first, then fewer samples, then fewer."""

import pytest
from pydantic import ValidationError

from glm_accelerate.config.schema import EvaluateSection
from glm_accelerate.plan.beside import Between
from glm_accelerate.plan.budget import Costs, begun, chosen

# 1,000 steps of a second; an evaluation of 200 samples takes 2 s.
RUN = Costs(steps=1000, left=1000, training=1000.0, spent=0.0, sample=0.01)


def section(**said: object) -> EvaluateSection:
    return EvaluateSection.model_validate({"budget": "3%", **said})


def total(every: int, samples: int, costs: Costs) -> float:
    """The share that it comes to."""
    spent = costs.spent + -(-costs.left // every) * samples * costs.sample
    return spent / (costs.training + (spent if costs.share == 1 else 0))


@pytest.mark.parametrize("percent", [1, 3, 10, 30])
@pytest.mark.parametrize("sample", [1e-3, 3e-3, 1e-2, 3e-2])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.125])
@pytest.mark.parametrize("left", [1000, 333])
def test_the_share_comes_to_the_budget(percent: int, sample: float, share: float, left: int) -> None:
    spent = percent / 100 * (1000 - left)
    costs = Costs(1000, left, 1000.0, spent, sample, share)
    pace = chosen(section(budget=f"{percent}%"), 200, costs)
    assert total(pace.every, pace.samples, costs) <= percent / 100 + 0.002
    capped = pace.every == 10 and pace.samples == 200  # as often as there is any use
    if not capped and percent / 100 <= 0.9 * share:
        assert total(pace.every, pace.samples, costs) > percent / 100 - 0.01 * max(1, percent / 10)


def test_what_gives_way_first() -> None:
    assert (chosen(section(), 200, RUN).every, chosen(section(), 200, RUN).samples) == (67, 200)
    dear = Costs(1000, 1000, 1000.0, 0.0, 0.1)
    pace = chosen(section(), 200, dear)
    assert pace.every == 100  # still ten of them
    assert 16 < pace.samples < 200
    dearest = Costs(1000, 1000, 1000.0, 0.0, 1.0)
    assert (chosen(section(), 200, dearest).every, chosen(section(), 200, dearest).samples) == (1000, 16)


def test_what_the_config_says_is_the_shortest_interval() -> None:
    assert chosen(section(every=250), 200, RUN).every == 250
    assert chosen(section(every=1), 200, RUN).every == 67
    cheap = Costs(1000, 1000, 1000.0, 0.0, 1e-9)
    assert chosen(section(), 200, cheap).every == 10  # a hundred of them
    assert chosen(section(every=4), 200, cheap).every == 4


def test_what_was_spent_too_much_is_saved_later() -> None:
    """With nothing left only the one after the last step is made."""
    costs = Costs(1000, 400, 1000.0, 25.0, 0.01)
    pace = chosen(section(), 200, costs)
    assert total(pace.every, pace.samples, costs) == pytest.approx(0.03, abs=0.003)
    assert chosen(section(), 200, Costs(1000, 400, 1000.0, 50.0, 0.01)).every == 400


def test_an_evaluator_beside_is_not_asked_for_more_than_it_can_do() -> None:
    """A budget above its share of the machines: nine tenths of its time."""
    costs = Costs(1000, 1000, 1000.0, 0.0, 0.01, share=0.1)
    pace = chosen(section(budget=0.3), 200, costs)
    assert total(pace.every, pace.samples, costs) <= 0.09


def test_before_the_run_by_tokens() -> None:
    work = Between(10, 100 * 3000, 200 * 100, 200 * 100, 200 * 100, 1e9, "bfloat16", 1e9)
    assert begun(EvaluateSection(), 1000, work, 200, (100, 200, "a tenth")) == (100, 200, "a tenth")
    every, samples, why = begun(section(), 1000, work, 200, (100, 200, "a tenth"))
    assert (every, samples) == (77, 200)  # 13 of 20,000 tokens, where 1,000 steps pass 9,000,000
    assert why == "3% of the time: 14 evaluations of up to 200 samples by tokens, then by what they take"


def test_as_people_write_it() -> None:
    assert section().budget == section(budget=0.03).budget == 0.03
    assert EvaluateSection().budget is None
    for wrong in ("3", "x%", "60%", "0%", -1, 3):
        with pytest.raises(ValidationError):
            section(budget=wrong)
    with pytest.raises(ValidationError, match="own machines"):
        section(where="external")
