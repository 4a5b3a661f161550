import pytest

from glm_accelerate.observe.figures import compared, enclosed, evaluation, metric, number


@pytest.mark.parametrize(
    ("value", "interval", "said"),
    [
        (2.1139, (2.0789, 2.1489), "2.114 ±0.035"),
        (2.1139, (1.9, 2.53), "2.11 ±0.42"),  # the longer side
        (2.1139, (2.11368, 2.11412), "2.11390 ±0.00022"),
        (80.0, (60.0, 100.0), "80.0 ±20.0"),
        (0.5, (-1.0, 3.14), "0.5 (0.0 to 3.1)"),  # of very few samples: no loss lies below zero
        (0.5, (-0.9, 0.9), "0.50 ±0.50"),
        (2.1139, None, "2.1139"),
        (2.1139, (2.1139, 2.1139), "2.1139"),  # all samples: nothing is left open
        (2.1139, (2.1139 - 1e-12, 2.1139 + 1e-12), "2.113900 ±0.000000"),
    ],
)
def test_a_value_is_written_to_the_digit_that_is_known(
    value: float, interval: tuple[float, float] | None, said: str
) -> None:
    assert enclosed(value, interval) == said


def test_scores_of_either_scale() -> None:
    assert [metric(value) for value in (0.25, 1, 31.417, -0.5)] == ["0.250", "1.000", "31.4", "-0.500"]


def test_a_comparison_says_which_is_better() -> None:
    against = {"step": 1300, "difference": -0.0213, "interval": (-0.034, -0.008), "verdict": "better"}
    assert compared(against) == "-0.0213 against 1,300: better"
    open_ = {**against, "verdict": "undecided"}
    assert compared(open_) == "-0.0213 against 1,300: undecided, too few samples to tell"
    alike = {"step": 300, "difference": 0.0, "interval": [0.0, 0.0], "verdict": "tied"}
    assert compared(alike) == "+0.0000 against 300: tied"


def test_an_evaluation_in_one_line() -> None:
    event = {
        "kind": "eval", "step": 400, "status": "done", "loss": 2.1139, "ci95": [2.0789, 2.1489],
        "samples": 700, "total": 4000, "metrics": {"rouge_l": 0.5, "bleu": 23.456},
        "seconds": 12.04, "where": "beside",
        "against": {"step": 300, "difference": -0.0213, "interval": [-0.034, -0.008], "verdict": "better"},
    }  # fmt: skip
    assert evaluation(event) == (
        "step 400: loss 2.114 ±0.035, rouge_l 0.500, bleu 23.5 (700 of 4,000) "
        "· -0.0213 against 300: better · 12.0 s beside"
    )
    finalist = {**event, "samples": 4000, "ci95": [2.1139, 2.1139], "metrics": {}, "against": None}
    assert evaluation(finalist, whole=True) == "step 400: loss 2.1139 on all 4,000 samples · 12.0 s beside"


def test_what_is_missing_is_left_out() -> None:
    assert evaluation({"kind": "eval", "step": 7, "status": "timeout"}) == "step 7: timeout"
    assert number({"step": "7"}, "step") == number({}, "step") == 0
