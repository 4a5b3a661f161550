"""The benchmark of blocked time at tiny size: every way really saves, and the report has all of them."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # `benchmarks` is no installed package

from benchmarks.checkpoint import blocked  # noqa: E402


def test_it_runs_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--megabytes", "2", "--repeats", "2", "--scratch", str(tmp_path), "--out", str(tmp_path / "out")]
    blocked.main(words)
    text = capsys.readouterr().out
    (result,) = (tmp_path / "out").glob("*-checkpoint-blocked-2mb.json")
    assert result.with_suffix(".md").read_text() + "\n" == text
    said = json.loads(result.read_text())
    assert len(said["rounds"]) == 2
    for round_ in said["rounds"]:
        assert list(round_["saves"])[:3] == ["ours, first", "ours, later", "torch.save"]
        for name, timing in round_["saves"].items():
            assert f"| {name} |" in text
            assert 0 < timing["blocked"] <= timing["total"]
            assert timing["bytes"] > 0.9 * said["bytes"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
