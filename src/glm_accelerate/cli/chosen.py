"""Which weights a PATH stands for: of a run the best, else the newest. Verbs that open a run say which."""

from dataclasses import dataclass
from pathlib import Path

from glm_accelerate.checkpoint.find import BEST, best_of, is_directory, resolve_path
from glm_accelerate.models.adapt.files import is_adapter
from glm_accelerate.runtime.errors import UserError


@dataclass(frozen=True, slots=True)
class Chosen:
    """What to open. Of a PATH that names its weights itself there is nothing to say."""

    path: Path
    why: str | None = None  # the best, or the newest
    said: str | None = None


def chosen(path: str) -> Chosen:
    """A run's weights; everything else as it is."""
    there = Path(path).expanduser()
    if not is_directory(there):
        hub = path.startswith("modelscope:") or (path.count("/") == 1 and not path.startswith((".", "/")))
        if not hub:
            what = "no run, checkpoint, snapshot, adapter or model is here"
            raise UserError(what, where=path, cure="check PATH")
        return Chosen(there)
    if is_adapter(there) or any((there / name).is_file() for name in ("config.json", "manifest.json")):
        return Chosen(there)
    weights = resolve_path(there)
    if weights == best_of(there):
        why, more = "the best", f" of {path} ({weights.relative_to(there)})"
    else:
        lost = (there / BEST).is_file()
        why, more = "the newest", ": the best is gone or damaged" if lost else ": no best is named yet"
    return Chosen(weights, why, f"step {int(weights.name.partition('-')[2]):,}, {why}{more}")


def run_of(weights: Path) -> Path | None:
    """The run that a checkpoint or a snapshot lies in, if it is one."""
    run = weights.resolve().parent.parent
    return run if (weights / "manifest.json").is_file() and (run / "config.yaml").is_file() else None
