"""Which checkpoints stay, a pure choice, and deletion: un-published first, so nobody meets half of one.

present -> choose_stale -> delete
"""

import errno
import math
import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from glm_accelerate.checkpoint.find import check, published
from glm_accelerate.checkpoint.format import FOLDER, LATEST, MANIFEST, Manifest, step_of
from glm_accelerate.checkpoint.lease import is_leased, sole
from glm_accelerate.config.schema import CheckpointSection
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.files import make_folder, sync

HOUR = 3600.0
YOUNGEST = HOUR  # thinning does not tell younger ones apart
FARTHEST = 4.0  # ages of neighbours after it, as a ratio: that is about one for each doubling


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint, as far as its staying goes."""

    step: int
    written: float  # Unix time
    loss: float | None = None  # held out
    best: bool = False  # as it was decided, which the lowest figure need not be
    evaluated: bool = True  # False: its evaluation is still to come
    leased: bool = False
    own: bool = True  # this run made it
    nonfinite: bool = False
    suspect: bool = False  # written since the training loss jumped, or just before that was seen


@dataclass(frozen=True, slots=True)
class Retained:
    """What became of those that could go, by step. What failed, and why, is tried again next time."""

    deleted: tuple[int, ...]
    failed: Mapping[int, str]


def choose_stale(entries: Sequence[Entry], keep: CheckpointSection, now: float) -> list[Entry]:
    """Those that may go, oldest first. What is in use, not yet judged or another's is never among them."""
    mine = sorted((entry for entry in entries if entry.own), key=lambda entry: entry.step)
    sound = [entry for entry in mine if not entry.nonfinite]
    judged = sorted(
        (not entry.best, math.inf if entry.loss is None else entry.loss, entry.step)
        for entry in sound
        if entry.best or (entry.loss is not None and math.isfinite(entry.loss))
    )
    stays = {entry.step for entry in sound[-keep.keep_last :]}
    stays |= {step for _, _, step in judged[: keep.keep_best]}
    stays |= {entry.step for entry in [entry for entry in sound if not entry.suspect][-1:]}
    if keep.keep_every_steps is not None:
        stays |= {entry.step for entry in sound if entry.step % keep.keep_every_steps == 0}
    if keep.keep_every_hours is not None:
        stays |= _spaced(sound, keep.keep_every_hours * HOUR)
    if keep.thin:
        stays |= _thinned(sound, now)
    return [e for e in mine if e.step not in stays and e.evaluated and not e.leased]


def present(
    run: Path,
    *,
    run_id: str | None,
    losses: Mapping[int, float],
    best: int | None = None,
    pending: Collection[int] = (),
    jumped: int | None = None,
) -> list[Entry]:
    """The checkpoints of a run that pass the cheap checks. Whatever does not is nobody's, and stays.

    `pending`: steps whose evaluation is still to come. `run_id`: whose checkpoints are own (schema 1 names
    no run and counts as own); None: all are. `jumped`: the step since which the training loss is too high.
    """
    there: list[tuple[Path, Manifest, float]] = []
    for path in published(run):
        try:
            there.append((path, check(path), (path / MANIFEST).stat().st_mtime))
        except (UserError, OSError):
            continue
    jumps = {jumped, *(manifest.facts.get("suspect") for _, manifest, _ in there)}
    return [
        Entry(
            step=manifest.step,
            written=written,
            loss=losses.get(manifest.step),
            best=manifest.step == best,
            evaluated=manifest.step not in pending,
            leased=is_leased(path),
            own=run_id is None or manifest.schema == 1 or manifest.run == run_id,
            nonfinite=bool(manifest.facts.get("nonfinite")),
            # The loss of a step judges the weights of the one before: that is where it went wrong.
            suspect="suspect" in manifest.facts or manifest.step + 1 in jumps,
        )
        for path, manifest, written in there
    ]


def delete(run: Path, stale: Iterable[Entry]) -> Retained:
    """Delete these, except those that somebody has begun to read. What cannot go is returned, not raised."""
    deleted: list[int] = []
    failed: dict[int, str] = {}
    for entry in stale:
        path = run / FOLDER / f"checkpoint-{entry.step}"
        try:
            if drop(path):
                deleted.append(entry.step)
        except OSError as error:
            failed[entry.step] = f"{error.filename or path}: {error.strerror}"
    return Retained(tuple(deleted), failed)


def drop(path: Path) -> bool:
    """Delete one, unless somebody reads it."""
    with sole(path) as free:
        if free:
            _delete(path)
    return free


def abandon_after(run: Path, step: int) -> list[int]:
    """Move every checkpoint later than `step` aside: it belongs to a branch that is given up."""
    moved: list[int] = []
    for path in published(run):
        number = step_of(path.name)
        if number is None or number <= step:
            continue
        aside = path_aside(run, path.name)
        try:
            path.rename(aside)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            shutil.copytree(path, aside)  # its checkpoints have a disk of their own
            _delete(path)
        moved.append(number)
    return sorted(moved)


def path_aside(run: Path, name: str) -> Path:
    """Where what is given up goes: into abandoned/, beside what is there."""
    folder = run / "abandoned"
    make_folder(folder)
    aside, copies = folder / name, 0
    while aside.exists():
        copies += 1
        aside = folder / f"{name}.{copies}"
    return aside


def sweep(directory: Path) -> None:
    """Remove what interrupted saves left. For the first rank, at the start, with the run's lock."""
    kinds = (".checkpoint-*", "..checkpoint-*", ".snapshot-*", "..snapshot-*")
    for pattern in (*kinds, f".{LATEST}.*"):
        for leftover in directory.glob(pattern):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)


def _spaced(entries: Sequence[Entry], seconds: float) -> set[int]:
    """From the oldest on, the next one that is so much younger. The same ones again after a deletion."""
    steps: set[int] = set()
    following = -math.inf
    for entry in entries:
        if entry.written >= following:
            steps.add(entry.step)
            following = entry.written + seconds
    return steps


def _thinned(entries: Sequence[Entry], now: float) -> set[int]:
    """One may go if its neighbours' ages are not far apart without it: as both age they only come closer."""
    entries = sorted(entries, key=lambda entry: entry.written)
    ages = [max(now - entry.written, YOUNGEST) for entry in entries]
    kept: list[int] = []
    for number in range(len(entries)):
        last = number + 1 == len(entries)
        if not kept or last or ages[kept[-1]] > FARTHEST * ages[number + 1]:
            kept.append(number)
    return {entries[number].step for number in kept}


def _delete(path: Path) -> None:
    """The name goes first: from then on it is no checkpoint, whatever becomes of its files."""
    trash = path.with_name(f".{path.name}.trash")
    if trash.exists():  # of a deletion that failed
        shutil.rmtree(trash)
    path.rename(trash)
    sync(trash.parent)
    os.unlink(trash / MANIFEST)
    shutil.rmtree(trash)
