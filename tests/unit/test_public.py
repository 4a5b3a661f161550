"""The few public names, and that importing the package runs nothing."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import glm_accelerate as ga
from glm_accelerate import WHERE


def test_every_public_name_is_there() -> None:
    assert sorted(WHERE) == sorted(ga.__all__)
    for name in WHERE:
        assert getattr(ga, name).__name__ == name


def test_train_is_called_by_its_public_name(tiny_run: dict[str, Any], tmp_path: Path) -> None:
    config = ga.RunConfig.model_validate({**tiny_run, "train": {"steps": 2}})
    result = ga.train(config, tmp_path / "run")
    assert result.done
    assert result.step == 2


@pytest.mark.process
def test_importing_loads_nothing_heavy() -> None:
    code = (
        "import sys, glm_accelerate; print([m for m in ('torch', 'pydantic', 'numpy') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
