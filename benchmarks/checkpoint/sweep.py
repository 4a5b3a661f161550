"""A save cut off at every call that changes files, by SIGKILL and by power loss: ours, and torch's DCP.

python -m benchmarks.checkpoint.sweep [--share 1] [--out DIR]

The suite runs a tenth of it (tests/system/test_kill_sweep.py). It needs strace and a minute.
"""

import argparse
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.report import Origin, origin, page, publish, table

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "system"))

from kill_sweep import points, saver, trace  # pyright: ignore[reportMissingImports]
from kill_sweep.points import Observed  # pyright: ignore[reportMissingImports]

WAYS = {
    "ours, in place": saver.in_place,
    "ours, in place, over what an interrupted save left": saver.once_more,
    "ours, behind": saver.behind,
    "DCP, in place": saver.dcp_in_place,
}
LEFT = ("step 1", "step 2", "neither", "nothing")

ABOUT = """\
A process saves step 1, then step 2, and is cut off there. What can then be loaded is step 1, step 2, neither
(it loads, but is what no step was), or nothing at all.

- `SIGKILL`: once for each call of the save that changes files, by strace, before the call is done. `behind`:
  the process that writes is killed; the trainer has to say so and its next save has to work. `SIGKILL of the
  trainer`: when its writer has just done that call; the writer has to end too.
- `error`: the call fails once (EIO from fsync, ENOSPC from all others). The save has to say so and leave
  nothing behind, and the next save of the same process has to work.
- `power loss`: before the first call and after each, rebuilt from the log of a save. Bytes and names that
  were not synced are lost, in four outcomes: all of them; only the bytes (none, or zeros); only the names.
- `broken`: points at which ours broke a promise. A checkpoint that is left verifies; whatever bears a
  checkpoint's name is whole; the newest is chosen and is exactly one of the two; it is step 2 once the save
  was said to be done; the next attempt sweeps what was left, and its save works.
- `DCP`: `dcp.save` into the same directory again, one process, as shipped.
"""


@dataclass(frozen=True)
class Part:
    """One way to save and one way to be cut off."""

    way: str
    fault: str
    possible: int
    observed: list[Observed]


def parts(way: str, share: float, scratch: Path) -> list[Part]:
    """Every fault for one way to save, at so many of the points."""
    saves, run = WAYS[way], scratch / "run"
    counted = points.count(saves, run)
    calls = points.spread(counted.calls, share)
    swept = [Part(way, "SIGKILL", len(counted.calls), [points.kill(saves, run, call) for call in calls])]
    if saves is saver.behind:
        orphans = [points.orphan(run, call) for call in calls]
        swept.append(Part(way, "SIGKILL of the trainer", len(counted.calls), orphans))
    if saves is not saver.dcp_in_place:
        failed = [points.fail(saves, run, call) for call in calls]
        swept.append(Part(way, "error", len(counted.calls), failed))
    losses = points.spread(counted.losses, share)
    dark = [points.lose_power(saves, run, loss) for loss in losses]
    return [*swept, Part(way, "power loss", len(counted.losses), dark)]


def markdown(source: Origin, swept: Sequence[Part]) -> str:
    def cells(part: Part) -> Sequence[object]:
        left = Counter(one.verdict.left for one in part.observed)
        broken = sum(bool(one.verdict.faults) for one in part.observed)
        return part.way, part.fault, len(part.observed), part.possible, *(left[it] for it in LEFT), broken

    lines = [ABOUT, table(("", "fault", "points", "of", *LEFT, "broken"), map(cells, swept), left=(0, 1))]
    for part in swept:
        if part.fault == "SIGKILL":
            points_left = ((f"`{one.point}`", one.verdict.left) for one in part.observed)
            lines += [f"\n## {part.way}: SIGKILL instead of\n", table(("", "left"), points_left, left=(0, 1))]
    broken = [(part, one) for part in swept for one in part.observed if one.verdict.faults]
    lines += ["\n## Broken\n"] if broken else []
    lines += [
        f"- {part.way}, {part.fault}, {one.point}: {'; '.join(one.verdict.faults)}" for part, one in broken
    ]
    return page("A save, cut off at every point", source, [], *lines)


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Cut a save off at every point.")
    parser.add_argument("--share", type=float, default=1.0, help="of the points, evenly spread")
    parser.add_argument("--out", type=Path, help="directory for the JSON and Markdown; default: only print")
    given = parser.parse_args(words)
    if reason := trace.why_not():
        raise SystemExit(reason)
    logging.disable(logging.WARNING)  # DCP's, for each directory that it cannot load
    source = origin(["python", "-m", "benchmarks.checkpoint.sweep", *words], {"torch": torch.__version__})
    with tempfile.TemporaryDirectory(prefix="sweep-") as scratch:
        swept = [part for way in WAYS for part in parts(way, given.share, Path(scratch))]
    figures = {"parts": [asdict(part) for part in swept]}
    publish(given.out, "checkpoint-sweep", source, markdown(source, swept), figures)


if __name__ == "__main__":
    main(sys.argv[1:])
