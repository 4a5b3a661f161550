"""What a run began on: its config, and whose weights, where those are not its model's."""

from pathlib import Path

from glm_accelerate.config.load import load_config
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.runtime.errors import UserError

INIT_FROM = "init_from"  # in a run's directory: whose weights it began on, where that is not its model


def begun_on(run: Path) -> Path | None:
    """Whose weights a run began on, if not on its config's model."""
    said = run / INIT_FROM
    return run / said.read_text(encoding="utf-8").strip() if said.is_file() else None


def config_of(checkpoint: Path) -> RunConfig:
    """The config of the run that a checkpoint lies in."""
    path = checkpoint.resolve().parent.parent / "config.yaml"
    if not path.is_file():
        raise UserError("the run's config.yaml is not where the checkpoint came from", where=path)
    return load_config(path)
