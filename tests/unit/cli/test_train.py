"""What `train` refuses before it trains, and how it shows what has changed."""

from pathlib import Path

import pytest

from glm_accelerate.cli.main import main
from glm_accelerate.config.load import to_yaml
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.training import run
from glm_accelerate.training.directory import Change, ConfigChanged
from glm_accelerate.training.mismatch import EVERY
from glm_accelerate.training.settle import Start


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    said = RunConfig.model_validate({"model": {"path": "m"}, "data": {"train": "t"}})
    (tmp_path / "c.yaml").write_text(to_yaml(said))
    return "c.yaml"


def test_what_changed_is_shown_as_it_is_written(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Brackets in a file's name are no colours."""

    def changed(*_: object, **__: object) -> None:
        raise ConfigChanged(Path("run"), [Change("data.train", "br[bold]/t", "a[/x]", "--accept [data]")])

    monkeypatch.setattr(run, "train", changed)
    assert main(["train", config]) == 2
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("br[bold]/t", "a[/x]", "--accept [data]"))


@pytest.mark.parametrize(
    "words",
    [
        ["train", "c.yaml", "--run", ""],
        ["train", "c.yaml", "--init-from="],
        ["demo", "--run", ""],
        ["checkpoints", ""],
        ["bench", "step", "c.yaml", "--out", ""],
    ],
)
def test_an_unset_variable_is_no_directory(
    words: list[str], config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert "it is empty: a shell's variable that is not set?" in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == [config]


@pytest.mark.parametrize(
    "words",
    [
        ["--accept", "order", "--accept", "schedule"],
        ["--accept", "order", "schedule"],
        ["--accept", "order,schedule"],
        ["--accept", "order", "train.steps=3", "schedule"],
    ],
)
def test_several_changes_are_accepted_in_any_form(
    words: list[str], config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted: list[frozenset[str]] = []

    def trained(*_: object, start: Start, **__: object) -> run.Result:
        accepted.append(start.accept)
        return run.Result(Path("run"), 1, "done", 0.0, {})

    monkeypatch.setattr(run, "train", trained)
    assert main(["train", config, *words]) == 0
    assert accepted == [frozenset({"order", "schedule"})]


def test_a_refused_start_leaves_no_directory_but_one_that_was_there(config: str) -> None:
    assert main(["train", config, "--run", "runs/new"]) == 2
    assert not Path("runs/new").exists()
    Path("mine").mkdir()
    assert main(["train", config, "--run", "mine"]) == 2
    assert Path("mine").is_dir()


def test_help_names_what_can_be_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert set(" ".join(capsys.readouterr().out.split()).replace(",", "").split()) >= EVERY
