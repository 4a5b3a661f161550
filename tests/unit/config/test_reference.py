"""What the verb `config` and docs/config.md say of every key, in both languages."""

import subprocess
import sys
from pathlib import Path

import pytest

from glm_accelerate.cli.main import main
from glm_accelerate.config.load import load_config, preset_names
from glm_accelerate.config.reference import Language, as_tables, sections
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.config.strict_yaml import read_document

ROOT = Path(__file__).parents[3]
PAGES: dict[Language, Path] = {"en": ROOT / "docs/config.md", "zh": ROOT / "docs/zh/config.md"}


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["config", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("language", list(PAGES))
def test_the_pages_have_every_key_as_it_is(language: Language) -> None:
    """To write them anew: what stands before the tables, then `glm-accelerate config --tables --lang ...`."""
    text = PAGES[language].read_text(encoding="utf-8")
    assert text.endswith("\n\n" + as_tables(language))


def test_the_example_of_both_pages_is_a_config(tmp_path: Path) -> None:
    examples = {
        page.read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0] for page in PAGES.values()
    }
    (example,) = examples
    (tmp_path / "my.yaml").write_text(example)
    assert load_config(tmp_path / "my.yaml").train.epochs == 3


def test_every_key_is_explained_in_chinese_and_none_besides() -> None:
    text = (ROOT / "src/glm_accelerate/config/keys.zh.yaml").read_text(encoding="utf-8")
    known = {name: list(values) for name, values in read_document(text, "keys.zh.yaml").values.items()}
    assert known == {
        section.name: ["about", *(key.name for key in section.keys)] for section in sections("en")
    }
    for section in sections("zh"):
        for about in (section.about, *(key.about for key in section.keys)):
            assert any("一" <= letter <= "鿿" for letter in about), about


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_written_out_is_the_preset(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.yaml").write_text(shown(capsys, f"preset:{name}"), encoding="utf-8")
    assert load_config(tmp_path / "my.yaml") == load_config(f"preset:{name}")


def test_what_yaml_would_read_otherwise_is_quoted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "data.train=['a: b.jsonl']",
        "memory.offload=[activations]",
        "precision.compile=off",
        "model.path='7'",
    ]
    (tmp_path / "my.yaml").write_text(shown(capsys, "preset:glm4-9b-0414-lora", *words), encoding="utf-8")
    assert load_config(tmp_path / "my.yaml") == load_config("preset:glm4-9b-0414-lora", words)


@pytest.mark.parametrize("section", [section.name for section in sections()])
def test_a_section_shows_its_defaults(
    section: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Copied into a config, they change nothing; what is required is left to fill in."""
    values = read_document(shown(capsys, section), section).values[section]
    least = RunConfig.model_validate({"model": {"path": "m"}, "data": {"train": "t"}}).model_dump(mode="json")
    assert list(values) == list(least[section])
    required = {"path", "train"} if section in ("model", "data") else set[str]()
    assert {key for key in values if values[key] != least[section][key]} <= required


def test_a_key_and_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "train.steps").splitlines()[0] == "train:  # For how long."
    assert len(shown(capsys, "train.steps", "--lang", "zh").splitlines()) == 3
    for words, close in (
        ("trian", "train"),
        ("train.step", "train.steps"),
        ("preset:glm4-9b-lora", "preset:"),
    ):
        assert main(["config", words]) == 2
        assert f"did you mean `{close}" in capsys.readouterr().err
    assert main(["config", "train", "train.steps=3"]) == 2  # of a section nothing is replaced


@pytest.mark.process
def test_the_overview_comes_without_torch() -> None:
    code = "import sys; from glm_accelerate.cli.main import main; main(['config']); assert 'torch' not in "
    code += "sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "preset" in done.stdout.lower()
    assert all(section.name in done.stdout for section in sections())
