"""Which checkpoint to open. An explicit path is opened as it is; the newest is looked for only when asked."""

from pathlib import Path

from glm_accelerate.checkpoint.format import read_manifest, step_of, verify
from glm_accelerate.runtime.errors import UserError

FOLDER = "checkpoints"


def published(run: Path) -> list[Path]:
    """Directories with a checkpoint's full name, newest step first. Whatever else lies there is ignored."""
    folder = run / FOLDER
    if not folder.is_dir():
        return []
    found = [(step, entry) for entry in folder.iterdir() if (step := step_of(entry.name)) is not None]
    return [entry for _, entry in sorted(found, reverse=True) if entry.is_dir()]


def latest(run: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, and why newer ones were passed over."""
    reasons: list[str] = []
    for candidate in published(run):
        try:
            verify(candidate)
        except UserError as error:
            reasons.append(str(error))
            continue
        return candidate, reasons
    return None, reasons


def resolve_path(path: Path) -> Path:
    """A checkpoint's directory from its own path or a run's."""
    if (path / "manifest.json").is_file():
        read_manifest(path)
        return path
    found, reasons = latest(path)
    if found is None:
        raise UserError("no checkpoint here" + "".join(f"; {reason}" for reason in reasons), where=path)
    return found
