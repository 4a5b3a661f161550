"""The weights that a run begins on, taken into the run: whoever wrote them deletes them one day.

base/DIGEST/   config.yaml   checkpoints/checkpoint-N/ (weights only)   init_from, if that run had one, too
"""

import os
import shutil
from pathlib import Path

from glm_accelerate.checkpoint.format import DIGEST, MANIFEST, WEIGHTS, digest, read_manifest
from glm_accelerate.checkpoint.origin import INIT_FROM, begun_on, config_of
from glm_accelerate.config.load import to_yaml
from glm_accelerate.config.paths import absolute
from glm_accelerate.runtime.files import sync, write_text

BASE = "base"  # in a run's directory


def adopt(source: Path, run: Path) -> str:
    """What `init_from` says of these weights: a model directory's path, or where in the run they are now."""
    if (source / "config.json").is_file():
        return str(source.absolute())
    place = Path(BASE, digest(source / MANIFEST)[:16])
    inside = place / source.parent.name / source.name
    if not (run / place).is_dir():
        partial = run / BASE / f".{place.name}"
        shutil.rmtree(partial, ignore_errors=True)  # left by a kill
        copy = partial / source.parent.name / source.name
        copy.mkdir(parents=True, mode=0o700)
        for name in _weights_of(source):
            _link_or_copy(source / name, copy / name)
        write_text(partial / "config.yaml", to_yaml(absolute(config_of(source))))
        if (begun := begun_on(source.resolve().parent.parent)) is not None:
            write_text(partial / INIT_FROM, f"{adopt(begun, partial)}\n")
        sync(copy)
        partial.rename(run / place)
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
