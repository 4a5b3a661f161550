"""Two configs in turn: the processes that run, what becomes of their figures, and of their failures."""

import sys
from pathlib import Path
from typing import Any

import pytest

from glm_accelerate.bench.compare import Side, compare, compare_report
from glm_accelerate.bench.report import markdown
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.runtime.errors import UserError

CHILD = """
import json, sys
from pathlib import Path
log = Path(sys.argv[1])
config = Path(sys.argv[2]).read_text()
speed = 100.0 if "method: full" in config else 250.0
runs = log.read_text() if log.exists() else ""
log.write_text(runs + ("B" if speed == 100.0 else "A"))
keys = ("samples_per_second", "cpu_seconds", "utilisation", "memory_bytes", "memory_above_start")
keys += ("first_seconds",)
machine = {"device": "a device", "threads": 1, "torch": "2"}
print(json.dumps(dict.fromkeys(keys, 1.0) | {"tokens_per_second": speed, "padding": 0.0, "machine": machine}))
"""


def sides(said: dict[str, Any]) -> tuple[Side, Side]:
    other = {**said, "adapt": {"method": "full"}}
    return Side("one", RunConfig.model_validate(said)), Side("other", RunConfig.model_validate(other))


def ignore(what: str, done: int, total: int) -> None:
    assert done <= total


@pytest.mark.process
def test_they_run_in_turn_and_the_ratio_is_that_of_neighbours(
    tiny_run: dict[str, Any], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    both = sides(tiny_run)
    found = compare(both, 3, [sys.executable, "-c", CHILD, str(log)], ignore)
    assert log.read_text() == "ABABAB"
    assert [(a["tokens_per_second"], b["tokens_per_second"]) for a, b in found] == [(250.0, 100.0)] * 3
    shown = markdown(compare_report(both, found))
    assert "| tokens a second | 250 | 100 | 0.400 | 0.400 to 0.400 |" in shown
    assert "| padding | 0 % | 0 % |  |  |" in shown  # nothing to divide by


@pytest.mark.process
@pytest.mark.parametrize(("code", "error"), [(2, UserError), (1, RuntimeError), (75, KeyboardInterrupt)])
def test_a_child_that_fails_ends_it(tiny_run: dict[str, Any], code: int, error: type[BaseException]) -> None:
    with pytest.raises(error):
        compare(sides(tiny_run), 3, [sys.executable, "-c", f"raise SystemExit({code})"], ignore)
