"""Which checkpoint to open. An explicit path is opened as it is; others are looked for only when asked.

The name and the manifest decide, never a date, and never the pointer alone: the newest good one wins.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from glm_accelerate.checkpoint.format import (
    Damaged,
    Kind,
    Manifest,
    folder_of,
    read_manifest,
    step_of,
    verify,
)
from glm_accelerate.runtime.errors import UserError

POINTER = "latest"
BEST = "best"  # in a run's directory: which weights are the best ones
LONGEST_POINTER = 100  # bytes; a full name has fewer


@dataclass(frozen=True, slots=True)
class Candidates:
    """Checkpoints of a run, newest first. The first one passed the cheap checks; the rest may still fail."""

    paths: list[Path]
    reasons: list[str]  # what was passed over, and why


def candidates(run: Path) -> Candidates:
    """What could be gone on from. No file is read whole: damage inside shows when it is read."""
    paths, odd = _listed(run)
    reasons: list[str] = []
    for number, path in enumerate(paths):
        try:
            require_finite(path, check(path))
        except Damaged as error:
            reasons.append(f"passed over: {error}")
            continue
        return Candidates(paths[number:], [*reasons, *_about_pointer(path), *_summary(run, odd)])
    return Candidates([], [*reasons, *_summary(run, odd)])


def require_finite(path: Path, manifest: Manifest) -> None:
    """Nothing good comes of weights or moments that are not: neither training nor answers."""
    if manifest.facts.get("nonfinite"):
        raise Damaged("its weights or moments are not finite", where=path)


def published(run: Path, kind: Kind = "checkpoint") -> list[Path]:
    """Directories with the full name of a checkpoint or snapshot, newest step first. Others are ignored."""
    return _listed(run, kind)[0]


def is_directory(path: Path) -> bool:
    """Whether it is one. A UserError says why that cannot be known."""
    try:
        return path.is_dir()
    except OSError as error:
        raise UserError(f"cannot be looked at: {error.strerror}", where=path) from error


def check(directory: Path) -> Manifest:
    """The manifest, if its digest is right and every file it names is there in its size."""
    manifest = read_manifest(directory)
    for name, entry in manifest.files.items():
        path = directory / name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise Damaged(f"{name} is missing ({error.strerror})", where=directory) from error
        if size != entry.bytes:
            raise Damaged(f"{name} is {size} bytes, should be {entry.bytes} bytes", where=directory)
    return manifest


def latest(run: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose every byte verifies, and why newer ones were passed over."""
    found = candidates(run)
    reasons = list(found.reasons)
    for path in found.paths:
        try:
            require_finite(path, verify(path))
        except Damaged as error:
            reasons.append(f"passed over: {error}")
            continue
        return path, reasons
    return None, reasons


def resolve_path(path: Path) -> Path:
    """A checkpoint's directory from its own path or a run's: the best by its evaluations, else the newest."""
    if (path / "manifest.json").is_file():
        return path
    if (best := best_of(path)) is not None:
        return best
    found = candidates(path)
    if not found.paths:
        raise UserError("no checkpoint here" + "".join(f"; {reason}" for reason in found.reasons), where=path)
    return found.paths[0]


def best_of(run: Path) -> Path | None:
    """The weights that evaluations found best, a checkpoint's or a snapshot's, if they are whole."""
    try:
        said = _read_short(run / BEST)
        folder, _, name = said.partition("/")
        kind: Kind = "snapshot" if folder == "snapshots" else "checkpoint"
        if folder != f"{kind}s" or step_of(name, kind) is None:
            return None
        check(run / folder / name)
        return run / folder / name
    except (OSError, Damaged):
        return None


def _listed(run: Path, kind: Kind = "checkpoint") -> tuple[list[Path], list[str]]:
    """Checkpoints by falling step, and the names of what else lies there. One look at the directory."""
    folder = folder_of(run, kind)
    steps: list[tuple[int, str]] = []
    odd: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                step = step_of(entry.name, kind)
                if step is not None and entry.is_dir(follow_symlinks=False):
                    steps.append((step, entry.name))
                elif entry.name != POINTER and not entry.name.startswith("."):  # unfinished saves are hidden
                    odd.append(entry.name)
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=folder) from error
    steps.sort(reverse=True)
    return [folder / name for _, name in steps], sorted(odd)


def _summary(run: Path, odd: list[str]) -> list[str]:
    if not odd:
        return []
    those = "entry is no checkpoint" if len(odd) == 1 else "entries are no checkpoints"
    return [f"{folder_of(run, 'checkpoint')}: {len(odd):,} {those} by name or kind, as {odd[0]!r}"]


def _about_pointer(newest: Path) -> Iterator[str]:
    """One sentence if the pointer does not name the newest good checkpoint."""
    pointer = newest.with_name(POINTER)
    try:
        said = _read_pointer(pointer)
    except OSError as error:
        said, why = None, f"cannot be read ({error.strerror})"
    else:
        why = "does not hold a checkpoint's name"
    if said is None:
        yield f"{pointer}: {why}; {newest.name} is the newest"
    elif said != newest.name:
        yield f"{pointer}: names {said}; {newest.name} is the newest that is whole"


def _read_pointer(pointer: Path) -> str | None:
    """Only a full name counts, so it never leads outside the directory."""
    name = _read_short(pointer)
    return name if step_of(name) is not None else None


def _read_short(file: Path) -> str:
    """One line. A link is not followed."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        content = os.read(descriptor, LONGEST_POINTER)
    finally:
        os.close(descriptor)
    return content.decode("ascii", "replace").removesuffix("\n")
