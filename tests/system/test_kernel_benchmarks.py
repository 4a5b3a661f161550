"""The benchmarks of attention and cross-entropy run at tiny size, and what they publish is whole."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.warm import Warm

pytestmark = pytest.mark.bench
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "ours", "plain"),
    [("attention", "SDPA by document", "definition"), ("cross_entropy", "ours, eager", "PyTorch")],
)
def test_tiny(name: str, ours: str, plain: str, tmp_path: Path, warm: Callable[..., Warm]) -> None:
    code = f"import runpy; runpy.run_module('benchmarks.kernels.{name}', run_name='__main__')"
    done = warm("--tiny", "--rounds", "1", "--out", str(tmp_path), cwd=ROOT, code=code).done()
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("*.json")
    said = json.loads(file.read_text())
    assert said["origin"]["commit"]
    by_case: dict[str, dict[str, dict[str, object]]] = {}
    for one in said["figures"]:
        by_case.setdefault(one["case"], {})[one["rival"]] = one
        assert (one["milliseconds"] is None) == bool(one["said"])  # whoever did not run says why
    judged = {name: rivals for name, rivals in by_case.items() if name.startswith("judged")}
    assert judged
    for rivals in judged.values():
        assert rivals[ours]["error"] <= 2 * rivals[plain]["error"] + 2**-8  # pyright: ignore[reportOperatorIssue]
    assert ours in file.with_suffix(".md").read_text()
