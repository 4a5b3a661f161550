"""What a run began on: its config, and the weights of --init-from, which are copied into the run, as whoever
wrote them deletes them one day.

base/DIGEST/   config.yaml   checkpoints/checkpoint-N/ (weights only)   init_from, if that run had one, too
"""

import os
import shutil
from pathlib import Path

from glm_accelerate.checkpoint.format import DIGEST, MANIFEST, WEIGHTS, digest, read_manifest
from glm_accelerate.config.load import absolute, load_config, to_yaml
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.files import sync, write_text

INIT_FROM = "init_from"  # in a run's directory: whose weights it began on, where that is not its model
BASE = "base"  # in a run's directory


def begun_on(run: Path) -> Path | None:
    """Whose weights a run began on, if not on its config's model."""
    file = run / INIT_FROM
    return run / file.read_text(encoding="utf-8").strip() if file.is_file() else None


def config_of(checkpoint: Path) -> RunConfig:
    """The config of the run that a checkpoint lies in."""
    path = checkpoint.resolve().parent.parent / "config.yaml"
    if not path.is_file():
        raise UserError("the run's config.yaml is not where the checkpoint came from", where=path)
    return load_config(path)


def adopt(source: Path, run: Path) -> str:
    """Take these weights into the run. Returns what `init_from` holds: their path there, or a model's."""
    if (source / "config.json").is_file():
        return str(source.absolute())
    folder = Path(BASE, digest(source / MANIFEST)[:16])
    inside = folder / source.parent.name / source.name
    if not (run / folder).is_dir():
        partial = run / BASE / f".{folder.name}"
        shutil.rmtree(partial, ignore_errors=True)  # left by a kill
        copy = partial / source.parent.name / source.name
        copy.mkdir(parents=True, mode=0o700)
        for name in _weights_of(source):
            _link_or_copy(source / name, copy / name)
        write_text(partial / "config.yaml", to_yaml(absolute(config_of(source))))
        if (begun := begun_on(source.resolve().parent.parent)) is not None:
            write_text(partial / INIT_FROM, f"{adopt(begun, partial)}\n")
        sync(copy)
        partial.rename(run / folder)
        sync(run / BASE)
    return str(inside)


def _weights_of(checkpoint: Path) -> list[str]:
    """The files that opening a checkpoint's weights reads."""
    manifest = read_manifest(checkpoint)
    if manifest.schema == 1:  # its tensors are named by all of its files
        return [MANIFEST, DIGEST, *manifest.files]
    weights = manifest.tensors.get(WEIGHTS, {})
    return [MANIFEST, DIGEST, *sorted({span.file for one in weights.values() for span in one.pieces})]


def _link_or_copy(source: Path, target: Path) -> None:
    """A published file is never written again, so one copy serves both, where the file system can do that."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        sync(target)
