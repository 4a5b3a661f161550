"""The run directory: its config, which may not change unnoticed, and where a start begins."""

from pathlib import Path

from glm_accelerate.checkpoint.find import latest, published
from glm_accelerate.checkpoint.publish import sweep, write_text
from glm_accelerate.checkpoint.retain import abandon_after
from glm_accelerate.config.load import load_config, to_yaml
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.runtime.errors import UserError

Change = tuple[str, object, object]  # key, then, now


class ConfigChanged(UserError):
    """The config of an existing run is not what it was."""

    def __init__(self, run: Path, changes: list[Change]) -> None:
        self.changes = changes
        keys = ", ".join(key for key, _, _ in changes)
        cure = "--accept-changes to go on with it, or --run DIR for a new run"
        super().__init__(f"the config of this run has changed: {keys}", where=run, cure=cure)


def keep_config(run: Path, config: RunConfig, accept_changes: bool) -> None:
    """Write config.yaml, or compare with the one there. A run that never began may still be mended."""
    path = run / "config.yaml"
    if path.is_file() and (run / "events.jsonl").is_file():
        changes = differences(load_config(path), config)
        if changes and not accept_changes:
            raise ConfigChanged(run, changes)
        if not changes:
            return
    write_text(path, to_yaml(config))


def differences(then: RunConfig, now: RunConfig) -> list[Change]:
    """Every key that differs, with both values."""
    before, after = then.model_dump(mode="json"), now.model_dump(mode="json")
    return [
        (f"{section}.{key}", before[section][key], after[section][key])
        for section in after
        for key in after[section]
        if before[section][key] != after[section][key]
    ]


def choose_start(run: Path, resume: str) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from (or None), and warnings. `resume`: auto, never, a step or a path."""
    sweep(run / "checkpoints")
    if resume == "never":
        moved = abandon_after(run, -1)
        return None, [f"checkpoints of steps {moved} are in abandoned/ now"] if moved else []
    if resume == "auto":
        return latest(run)
    if resume.isascii() and resume.isdigit():
        path = run / "checkpoints" / f"checkpoint-{int(resume)}"
        if not path.is_dir():
            there = ", ".join(path.name.removeprefix("checkpoint-") for path in reversed(published(run)))
            raise UserError(f"no checkpoint of step {resume}", where=run, cure=f"there are {there or 'none'}")
        return path, []
    path = Path(resume)
    if not path.is_dir():
        raise UserError("no such checkpoint", where=path, cure="--resume auto, never, a step or a directory")
    return path, []
