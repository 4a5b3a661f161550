"""docs/howto/evaluate.md: its commands are understood as they stand, and its metric is one."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from glm_accelerate.cli import evaluate
from glm_accelerate.cli.main import Parser
from glm_accelerate.config.load import override
from glm_accelerate.config.schema import DataSection, EvaluateSection, RunConfig
from glm_accelerate.evaluate.measuring.metrics import Scorer, metric_names

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs/howto/evaluate.md", ROOT / "docs/tutorial.md", ROOT / "docs/faq.md"]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def commands(verb: str) -> list[str]:
    """The arguments of every whole command, in a block or in backticks."""
    found = re.findall(rf"(?:^|[`=\d] ?)glm-accelerate {verb} ([^`\n]+)", TEXT, re.MULTILINE)
    return [words for words in found if "..." not in words]


@pytest.mark.parametrize("words", sorted(set(commands("evaluate"))))
def test_every_evaluate_command_is_understood(words: str) -> None:
    parser = Parser()
    evaluate.arguments(parser)
    assert parser.parse_intermixed_args(shlex.split(words)).path


def test_the_help_names_the_defaults_of_the_config() -> None:
    parser = Parser()
    evaluate.arguments(parser)
    shown = " ".join(parser.format_help().split())
    for option, section, field in (
        ("--max-tokens", DataSection, "max_tokens"),
        ("--max-new-tokens", EvaluateSection, "max_new_tokens"),
    ):
        (number,) = re.findall(rf"{option} N (?!--).*?else (\d+)\)", shown)
        assert int(number) == section.model_fields[field].default


def test_every_setting_is_one() -> None:
    config = RunConfig.model_validate({"model": {"path": "m"}, "data": {"train": "t", "dev": "d"}})
    said = re.findall(r"`?(evaluate\.\w+=(?:'[^']*'|[^\s`'，、]+))", TEXT)
    assert len(said) >= 8
    for setting in said:
        (word,) = shlex.split(setting)
        if ".py:" not in word:
            assert override(config, [word])
    named = set(re.findall(r"`evaluate\.(\w+)`", TEXT))
    assert named <= set(type(config.evaluate).model_fields)


def test_the_metric_of_the_page_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGES[0].read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("keywords.py").write_text(code)
    (name,) = metric_names(["loss", "keywords.py:same_keys"])
    names: dict[str, Any] = {}
    exec(compile(code, "keywords.py", "exec"), names)
    reference = '{"a": 1, "b": 2}'
    answers = (reference, '{"a": 3}', "not JSON")
    assert [names["same_keys"](reference, answer) for answer in answers] == [1.0, 0.5, 0.0]
    scorer = Scorer([name])
    assert scorer.broken == {}
    assert scorer(reference, answers[1])[0] == {name: 0.5}
