"""In which order `evaluate RUN --follow` answers: the oldest first, where no evaluation may be left out."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from glm_accelerate.cli.main import main


def test_the_oldest_first_where_all_count(
    tiny_run: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Training has asked three times and ended; whoever follows then begins at the beginning."""
    evaluate = {"every": 7, "where": "external", "patience": 0, "keep": "all"}
    config = {**tiny_run, "evaluate": evaluate, "precision": {"compute": "float32"}}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    run = tmp_path / "run"
    assert main(["train", str(tmp_path / "my.yaml"), "--run", str(run)]) == 0
    capfd.readouterr()
    assert main(["evaluate", str(run), "--follow", "--once"]) == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if line.endswith("evaluating")]
    assert lines == ["step 0: evaluating", "step 7: evaluating", "step 14: evaluating"]
