import io
from pathlib import Path

import pytest
from rich.console import Console

from glm_accelerate.cli.demo import new_directory
from glm_accelerate.demo.show import scores, show_answers
from glm_accelerate.demo.task import Example
from glm_accelerate.runtime.errors import UserError


def test_a_second_demo_takes_the_next_free_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for wanted in ("runs/demo", "runs/demo-2", "runs/demo-3"):
        found = new_directory(None)
        assert found == Path(wanted)
        found.mkdir(parents=True)
        (found / "config.yaml").touch()


def test_an_empty_directory_may_be_given_and_a_full_one_not(tmp_path: Path) -> None:
    assert new_directory(tmp_path) == tmp_path
    (tmp_path / "mine").touch()
    with pytest.raises(UserError, match="there is something already"):
        new_directory(tmp_path)
    with pytest.raises(UserError, match="there is something already"):
        new_directory(tmp_path / "mine")


def test_answers_are_marked_and_can_not_move_the_cursor() -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    asked = [Example("number", "7", "[bold]q?", "seven"), Example("number", "8", "eight?", "eight")]
    show_answers("Before", asked, ["seven", "\x1b[2J" + "x" * 100], console)
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    assert [line for line in said.splitlines() if "[bold]q?" in line and "✓" in line]
    assert [line for line in said.splitlines() if "eight?" in line and "✗" in line]
    assert "\x1b" not in said
    assert "x" * 61 not in said


def test_scores_are_those_of_the_first_and_the_last_evaluation() -> None:
    events: list[dict[str, object]] = [
        {"kind": "eval", "step": step, "metrics": {"exact_match": share}}
        for step, share in ((0, 0.0), (5, 0.5), (9, 0.75))
    ]
    assert scores([{"kind": "start"}, *events]) == (0.0, 0.75)
