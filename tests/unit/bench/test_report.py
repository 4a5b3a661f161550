"""What is written can be read again: JSON that is strict, Markdown that is a table, an SVG that is XML."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from glm_accelerate.bench.report import Report, Table, as_json, markdown, show, write
from glm_accelerate.observe.chart import Bar
from glm_accelerate.runtime.errors import UserError

REPORT = Report(
    name="kind",
    title="A <title> & [more]",
    about=("one line",),
    tables=(Table("Figures", ("", "value"), (("speed | of [light]", "3"), ("other", "4"))),),
    picture=(Bar("a < b", 2.0, "2 s"), Bar("none", 0.0, "0 s")),
    figures={"speed": float("nan"), "rows": ({"peak": float("inf")}, {"peak": 2.5}), "name": "ä"},
)


def test_figures_that_are_not_finite_are_null() -> None:
    said = json.loads(as_json(REPORT), parse_constant=lambda word: pytest.fail(word))
    assert said == {"speed": None, "rows": [{"peak": None}, {"peak": 2.5}], "name": "ä"}


def test_a_report_is_three_files(tmp_path: Path) -> None:
    write(REPORT, tmp_path / "new")
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert names == ["bench-kind.json", "bench-kind.md", "bench-kind.svg"]
    text = (tmp_path / "new/bench-kind.md").read_text(encoding="utf-8")
    assert text == markdown(REPORT)
    assert "| speed \\| of [light] | 3 |" in text
    assert "(bench-kind.svg)" in text


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the report"):
        write(REPORT, tmp_path / "file")


def test_names_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    show(REPORT, Console(width=100))
    shown = capsys.readouterr().out
    assert "A <title> & [more]" in shown
    assert "speed | of [light]" in shown
