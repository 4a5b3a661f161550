"""A tenth of the kill sweep: real saves, killed by strace, and power losses built from their logs.

All of it: `python -m benchmarks.checkpoint.sweep`.
"""

import json
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]  # neither is installed

from kill_sweep import points, power, saver, trace  # noqa: E402

from benchmarks.checkpoint import sweep  # noqa: E402

WHY_NOT = trace.why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it can run here")

SHARE = 0.1
OURS = [way for name, way in sweep.WAYS.items() if name.startswith("ours")]


@pytest.mark.parametrize("way", OURS)
def test_whatever_cuts_a_save_off_a_whole_checkpoint_is_left_and_the_next_save_works(
    way: saver.Way, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    counted = points.count(way, run)
    assert {"openat", "write", "fsync", "rename", "mkdir"} <= {call.name for call in counted.calls}
    for call in points.spread(counted.calls, SHARE):
        for cut in (points.kill, points.fail):
            observed = cut(way, run, call)
            assert not observed.verdict.faults, observed
    for loss in points.spread(counted.losses, SHARE):
        observed = points.lose_power(way, run, loss)
        assert not observed.verdict.faults, observed


def test_a_save_that_said_it_is_done_survives_a_power_loss(tmp_path: Path) -> None:
    losses = points.count(saver.in_place, tmp_path / "run").losses
    for loss in losses[-len(power.OUTCOMES) :]:
        assert loss.done
        observed = points.lose_power(saver.in_place, tmp_path / "dark", loss)
        assert observed == points.Observed(loss.point, points.Verdict("step 2")), observed
    first = points.lose_power(saver.in_place, tmp_path / "dark", losses[0])
    assert first.verdict.left == "step 1", first


def test_a_writer_ends_with_its_trainer_wherever_it_is(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for call in points.spread(points.count(saver.behind, run).calls, SHARE):
        observed = points.orphan(run, call)
        assert not observed.verdict.faults, observed


def test_the_judge_sees_what_is_broken(tmp_path: Path) -> None:
    """DCP writes over its only checkpoint: the same sweep has to find the points at which nothing is left."""
    run = tmp_path / "run"
    calls = points.count(saver.dcp_in_place, run).calls
    left = {
        call.name: points.kill(saver.dcp_in_place, run, call).verdict.left for call in (calls[0], calls[-1])
    }
    assert left == {"mkdir": "step 1", "rename": "nothing"}


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep.main(["--share", "0.01", "--out", str(tmp_path)])
    (result,) = tmp_path.glob("*-checkpoint-sweep.json")
    assert result.with_suffix(".md").read_text() + "\n" == capsys.readouterr().out
    said = json.loads(result.read_text())
    for part in said["parts"]:
        assert part["possible"] >= len(part["observed"]) == 1 or part["fault"] == "power loss"
        assert not part["observed"][0]["verdict"]["faults"], part
