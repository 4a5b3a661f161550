"""What the documents say exists: paths, links, verbs, presets, public names, and the README's Python."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import glm_accelerate as ga
from glm_accelerate.cli.main import VERBS
from glm_accelerate.config.load import preset_names

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "README.zh.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_named_files_exist(page: Path) -> None:
    """A path in backticks is a file of this repository, or of the package."""
    named = re.findall(r"`([\w./-]+/(?:[\w.-]+\.(?:py|md|sh|yaml))?)`", page.read_text(encoding="utf-8"))
    outside = ("runs/my/evals/", "benchmarks/results/race-")
    for name in named:
        if name.startswith(outside):
            continue
        assert (ROOT / name).exists() or (ROOT / "src/glm_accelerate" / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_named_benchmarks_exist(page: Path) -> None:
    """Those of finished studies alone stand in an earlier commit."""
    named = re.findall(r"python -m (benchmarks[.\w]+)", page.read_text(encoding="utf-8"))
    files = [ROOT / name.replace(".", "/") for name in named if page.name != "studies.md"]
    assert [str(file) for file in files if not (file.is_dir() or file.with_suffix(".py").exists())] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_named_verbs_and_presets_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"glm-accelerate ([a-z]\w+) ", text)) <= set(VERBS)
    assert set(re.findall(r"preset:([a-z0-9.-]+)", text)) <= set(preset_names())


def test_the_architecture_fits_on_two_pages_and_its_glossary_in_thirty_words() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 130
    words = text.partition("## Words")[2].strip().splitlines()[2:]
    assert 10 <= len(words) <= 30


@pytest.mark.process
@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_explains_itself(verb: str) -> None:
    command = [sys.executable, "-m", "glm_accelerate.cli.main", verb, "--help"]
    assert "usage: glm-accelerate" in subprocess.check_output(command, text=True)


def test_the_python_in_the_readme_runs(
    tiny_run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it stands, but for the place of the model and the number of steps."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(tiny_run))
    monkeypatch.chdir(tmp_path)
    code = code.replace("/models/GLM-4-9B-0414", str(tiny_run["model"]["path"])).replace(
        "steps=100", "steps=2"
    )
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert isinstance(names["result"], ga.Result)
    assert names["result"].done
    assert any("lora_A" in name for name, _ in names["model"].named_parameters())


def test_the_checkpointer_in_a_loop_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the page has it, and once more: the second time it begins where the first ended."""
    page = ROOT / "docs/howto/own-loop.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code, page.name, "exec"), names)
    assert capsys.readouterr().out == "50 runs/mine/checkpoints/checkpoint-50\n"  # the loop is over at once
    again: dict[str, Any] = {}
    exec(compile(code, page.name, "exec"), again)
    assert again["model"].weight.equal(names["model"].weight)
