"""Which checkpoint to open. An explicit path is opened as it is; others are looked for only when asked.

The name and the manifest decide, never a date, and never the pointer alone: the newest good one wins.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from glm_accelerate.checkpoint.format import (
    FOLDER,
    LATEST,
    MANIFEST,
    Damaged,
    Kind,
    Manifest,
    folder_of,
    read_manifest,
    step_of,
)
from glm_accelerate.runtime.errors import UserError

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
    reasons, summary = list[str](), list[str]()
    if odd:
        those = "entry is no checkpoint" if len(odd) == 1 else "entries are no checkpoints"
        summary = [f"{run / FOLDER}: {len(odd):,} {those} by name or kind, as {odd[0]!r}"]
    for number, path in enumerate(paths):
        try:
            require_finite(path, check(path))
        except Damaged as error:
            reasons.append(f"passed over: {error}")
            continue
        return Candidates(paths[number:], [*reasons, *_about_pointer(path), *summary])
    return Candidates([], [*reasons, *summary])


def require_finite(path: Path, manifest: Manifest) -> None:
    """Refuse weights or moments that are not finite: neither training nor answers come of them."""
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


def resolve_path(path: Path) -> Path:
    """A checkpoint's directory from its own path or a run's: the best by its evaluations, else the newest."""
    if (path / MANIFEST).is_file():
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
        folder, _, name = _read_short(run / BEST).partition("/")
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
                elif entry.name != LATEST and not entry.name.startswith("."):  # unfinished saves are hidden
                    odd.append(entry.name)
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=folder) from error
    steps.sort(reverse=True)
    return [folder / name for _, name in steps], sorted(odd)


def _about_pointer(newest: Path) -> Iterator[str]:
    """One sentence if the pointer does not name the newest good checkpoint. Only a full name counts."""
    pointer = newest.with_name(LATEST)
    try:
        name = _read_short(pointer)
    except OSError as error:
        yield f"{pointer}: cannot be read ({error.strerror}); {newest.name} is the newest"
        return
    if step_of(name) is None:
        yield f"{pointer}: does not hold a checkpoint's name; {newest.name} is the newest"
    elif name != newest.name:
        yield f"{pointer}: names {name}; {newest.name} is the newest that is whole"


def _read_short(file: Path) -> str:
    """One line. A link is not followed."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        content = os.read(descriptor, LONGEST_POINTER)
    finally:
        os.close(descriptor)
    return content.decode("ascii", "replace").removesuffix("\n")
