import io
import json
from dataclasses import replace

from rich.console import Console

from glm_accelerate.cli.findings import as_json, show
from glm_accelerate.evaluate.protocol.messages import Comparison, EvaluationResult, Findings, Prediction

RESULT = EvaluationResult(
    step=400, exam_id="0123abcd", attempt=0, status="done", loss=2.1139, ci95=(2.08, 2.15), samples=700,
    asked=128, total=4000,
    metrics={"exact_match": 0.25, "my[red].py:score": 31.4159},
    intervals={"exact_match": (0.2, 0.31)}, seconds=12.04,
    against=Comparison(300, "300-0123abcd-1", -0.0213, (-0.034, -0.008), "better", 3, 4),
    by={"device": "cuda:1", "dtype": "bfloat16", "float32 differs by": "-6.4e-05"},
)  # fmt: skip
FINDINGS = Findings(RESULT, None, [Prediction("p", "r", "a", {})] * 128)


def shown(findings: Findings) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    show(findings, console)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_table_and_what_it_is_enough_for() -> None:
    head, *rows = shown(FINDINGS)
    assert head.split() == ["metric", "value", "95", "%", "interval", "samples"]
    assert [row.split("  ")[0] for row in rows[:4]] == [
        "loss",
        "perplexity",
        "exact_match",
        "my[red].py:score",
    ]
    assert rows[0].split() == ["loss", "2.1139", "2.0800", "to", "2.1500", "700", "of", "4,000"]
    assert rows[1].split()[1:5] == ["8.28", "8.004", "to", "8.585"]  # the ends of the loss, exponentiated
    assert rows[2].split()[1:] == ["0.250", "0.200", "to", "0.310", "128", "of", "4,000"]
    assert rows[3].split()[1:] == ["31.4", "128", "of", "4,000"]
    assert rows[4:] == [
        "12.0 s on cuda:1 in bfloat16. Intervals are for the figure of all 4,000 samples. Enough to compare "
        "steps on the same 700; for a figure to publish: --samples all",
        "-0.0213 against 300: better (95 %: -0.0340 to -0.0080), enough to choose between the two",
        "On a few samples the loss in bfloat16 and in float32 differ by -6.4e-05.",
    ]


def test_all_samples_leave_nothing_open_but_other_text() -> None:
    exact = replace(RESULT, samples=4000, asked=0, ci95=(2.1139, 2.1139), metrics={}, against=None)
    rows = shown(Findings(exact))
    assert rows[1].split() == ["loss", "2.1139", "exact", "4,000", "of", "4,000"]
    assert "All 4,000 samples: exact for these; other text would give other figures." in rows[3]


def test_answers_alone_are_exact_where_all_were_asked() -> None:
    """Some of them have no question."""
    alone = replace(RESULT, loss=None, ci95=None, samples=0, asked=4000, against=None)
    assert "All 4,000 samples: exact for these" in shown(Findings(alone))[-2]
    assert "Intervals are for the figure of all 4,000" in shown(Findings(replace(alone, asked=128)))[-2]


def test_of_few_samples_little_is_said_and_no_loss_below_zero() -> None:
    few = replace(RESULT, loss=0.5, ci95=(-0.5, 3.0), samples=8, metrics={}, against=None)
    rows = shown(Findings(replace(few, by={**RESULT.by, "left_out": "1 without an answer"})))
    assert rows[1].split()[2:5] == ["0.0000", "to", "3.0000"]
    assert rows[2].split()[2:5] == ["1", "to", "20.09"]
    said = "Intervals are for the figure of all 4,000 samples (1 without an answer left out)."
    assert rows[3].endswith(f"{said} For a figure to publish: --samples all")


def test_what_could_not_be_measured_is_said_and_a_diverged_model_has_a_perplexity() -> None:
    rows = shown(Findings(replace(RESULT, loss=1e4, ci95=None, metrics={}, reason="my.py:score: it raised")))
    assert rows[-1] == "Not measured: my.py:score: it raised"
    assert rows[2].split()[1] == "1.014e+304"


def test_the_same_for_programs() -> None:
    said = json.loads(as_json(FINDINGS, "runs/my"))
    assert (said["path"], said["loss"], said["ci95"], said["answers"]) == (
        "runs/my",
        2.1139,
        [2.08, 2.15],
        128,
    )
    assert said["against"]["verdict"] == "better"
    assert said["float32_difference"] == -6.4e-05
    assert set(said["by"]) == {"device", "dtype"}
