"""Which checkpoints stay. A pure choice, and a deletion that un-publishes before it deletes."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from glm_accelerate.checkpoint.find import published
from glm_accelerate.checkpoint.format import MANIFEST, step_of


def choose_stale(steps: list[int], losses: Mapping[int, float], keep_last: int, keep_best: int) -> list[int]:
    """Steps that may go: neither among the newest, nor among those with the lowest held-out loss."""
    newest = set(sorted(steps)[-keep_last:])
    judged = sorted((loss, step) for step, loss in losses.items() if step in steps)
    best = {step for _, step in judged[:keep_best]}
    return [step for step in sorted(steps) if step not in newest | best]


def retain(run: Path, losses: Mapping[int, float], keep_last: int, keep_best: int) -> list[int]:
    """Delete what may go; returns the steps deleted."""
    there = {step: path for path in published(run) if (step := step_of(path.name)) is not None}
    stale = choose_stale(list(there), losses, keep_last, keep_best)
    for step in stale:
        trash = there[step].with_name(f".{there[step].name}.trash")
        there[step].rename(trash)  # from here on it is no checkpoint
        (trash / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(trash, ignore_errors=True)
    return stale


def abandon_after(run: Path, step: int) -> list[int]:
    """Move every checkpoint later than `step` aside: it belongs to a branch that is given up."""
    moved: list[int] = []
    for path in published(run):
        number = step_of(path.name)
        if number is None or number <= step:
            continue
        folder = run / "abandoned"
        folder.mkdir(exist_ok=True)
        copies = len(list(folder.glob(f"{path.name}*")))
        path.rename(folder / (path.name if not copies else f"{path.name}.{copies}"))
        moved.append(number)
    return sorted(moved)
