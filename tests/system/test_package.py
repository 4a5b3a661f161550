"""The wheel and the sdist: what is in them, and that a wheel trains from where it was installed."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from glm_accelerate.cli.doctor import EXTRAS

ROOT = Path(__file__).parents[2]
BUILD = "import sys, setuptools.build_meta as b; out = sys.argv[1]; b.build_sdist(out); b.build_wheel(out)"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both, made of a copy: building writes beside the sources."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=source, check=True, capture_output=True)
    return out


def packaged(names: list[str]) -> set[str]:
    return {
        name[name.index("glm_accelerate/") :]
        for name in names
        if "/glm_accelerate/" in f"/{name}" and name[-1] != "/"
    }


@pytest.mark.process
def test_every_file_of_the_package_is_in_both(built: Path) -> None:
    sources = ROOT / "src/glm_accelerate"
    files = [path for path in sources.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    known = {str(path.relative_to(sources.parent)) for path in files}
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert packaged(zipfile.ZipFile(wheel).namelist()) == known
    with tarfile.open(sdist) as inside:
        assert packaged([one.name for one in inside.getmembers() if one.isfile()]) == known


@pytest.mark.process
def test_a_wheel_trains_where_it_is_installed(built: Path, tiny_run: dict[str, Any], tmp_path: Path) -> None:
    """From another directory, with nothing of this checkout; torch stays the one that is there."""
    (wheel,), place = built.glob("*.whl"), tmp_path / "site"
    words = [
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-compile",
        "--disable-pip-version-check",
    ]
    subprocess.run([sys.executable, "-m", *words, "--target", str(place), str(wheel)], check=True)
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(tiny_run))
    environment = {**os.environ, "PYTHONPATH": str(place)}

    code = "import sys, glm_accelerate as ga; print(ga.__file__); from glm_accelerate.cli.main import main; "
    code += "sys.exit(main(['train', 'my.yaml', 'train.steps=2', '--run', 'run']))"
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(place))
    assert (tmp_path / "run/checkpoints/checkpoint-2").is_dir()


def test_the_version_is_the_newest_of_the_changelog() -> None:
    (newest, *_) = re.findall(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest == version("glm-accelerate")


def test_doctor_names_the_extras_that_there_are() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS) == project["optional-dependencies"].keys() - {"dev"}
