"""The weights that a PATH means: of a run the best, else the newest. Verbs that open a run tell which."""

from dataclasses import dataclass
from pathlib import Path

from glm_accelerate.checkpoint.find import BEST, best_of, candidates, is_directory, resolve_path
from glm_accelerate.checkpoint.format import FOLDER
from glm_accelerate.models.adapter_files import is_adapter
from glm_accelerate.runtime.env import expanded
from glm_accelerate.runtime.errors import UserError

NOTHING = "no run, checkpoint, snapshot, adapter or model is here"


@dataclass(frozen=True, slots=True)
class Chosen:
    """What to open, and why where PATH leaves it open."""

    path: Path
    why: str | None = None  # the best, or the newest
    message: str | None = None
    passed_over: tuple[str, ...] = ()  # newer ones that are damaged or not finite


def chosen(path: str) -> Chosen:
    """A run's weights; everything else as it is."""
    there = expanded(path)
    if not is_directory(there):
        name = path.count("/") == 1 and not path.startswith((".", "/"))
        beside_runs = any(there.parent.glob("*/config.yaml"))  # then it is no hub's name, but mistyped
        if not path.startswith("modelscope:") and (not name or beside_runs):
            raise UserError(NOTHING, where=path, cure="check PATH")
        return Chosen(there)
    if is_adapter(there) or any((there / name).is_file() for name in ("config.json", "manifest.json")):
        return Chosen(there)
    if not ((there / "config.yaml").is_file() or (there / FOLDER).is_dir()):
        raise UserError(NOTHING, where=path, cure="check PATH")
    weights = resolve_path(there)
    if weights == best_of(there):
        why, more, passed = "the best", f" of {path} ({weights.relative_to(there)})", list[str]()
    else:
        lost = (there / BEST).is_file()
        passed = [one for one in candidates(there).reasons if one.startswith("passed over")]
        why, more = "the newest", ": the best is gone or damaged" if lost else ": no best is named yet"
    return Chosen(weights, why, f"step {int(weights.name.partition('-')[2]):,}, {why}{more}", tuple(passed))


def run_of(weights: Path) -> Path | None:
    """The run that a checkpoint or a snapshot lies in, if it is one."""
    run = weights.resolve().parent.parent
    return run if (weights / "manifest.json").is_file() and (run / "config.yaml").is_file() else None
