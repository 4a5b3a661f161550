"""The run directory: its config, which may not change unnoticed, and where a start begins."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from glm_accelerate.assemble.foreign import is_foreign
from glm_accelerate.checkpoint.find import candidates, is_directory, published
from glm_accelerate.checkpoint.format import FOLDER, Damaged, folder_of, step_of
from glm_accelerate.checkpoint.retain import abandon_after, sweep
from glm_accelerate.config.load import absolute, load_config
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.training.mismatch import accepted_as

Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class Change:
    """A key of the config that is not what it was."""

    key: str
    then: object
    now: object
    flag: str  # what accepts it


class ConfigChanged(UserError):
    """The config of an existing run is not what it was."""

    def __init__(self, run: Path, changes: list[Change]) -> None:
        self.changes = changes
        keys = ", ".join(change.key for change in changes)
        names = dict.fromkeys(name for change in changes for name in change.flag.split()[1::2])
        flags = " ".join(f"--accept {name}" for name in names)
        cure = f"{flags} (or --accept-changes for all) to go on with it, or --run DIR for a new run"
        super().__init__(f"the config of this run has changed: {keys}", where=run, cure=cure)


@dataclass(frozen=True, slots=True)
class StartChoice:
    """Where to go on: the first of `paths` that reads whole. None at all: at the beginning."""

    paths: tuple[Path, ...]
    warnings: tuple[str, ...] = ()
    explicit: bool = False  # named by the user: nothing else will do
    foreign: bool = False  # a stock checkpoint


def check_config(run: Path, config: RunConfig, accept: Collection[str]) -> None:
    """Compare with config.yaml. A run that never began may still be mended."""
    path = run / "config.yaml"
    if path.is_file() and (run / "events.jsonl").is_file():
        changes = differences(absolute(load_config(path)), config)
        refused = [change for change in changes if accepted_as(change.key) not in accept]
        if refused:
            raise ConfigChanged(run, refused)


def differences(then: RunConfig, now: RunConfig) -> list[Change]:
    """Every key that differs, with both values and the flag that accepts it."""
    before, after = then.model_dump(mode="json"), now.model_dump(mode="json")
    changes: list[Change] = []
    for section in after:
        for name in after[section]:
            old, new, key = before[section][name], after[section][name], f"{section}.{name}"
            if old != new:
                # Steps of another size are another number in an epoch.
                longer = key in ("train.step_samples", "train.step_tokens") and now.train.steps is None
                flag = f"--accept {accepted_as(key)}" + (" --accept schedule" if longer else "")
                changes.append(Change(key, old, new, flag))
    return changes


def choose_start(run: Path, resume: str) -> StartChoice:
    """The checkpoints to go on from. `resume`: auto, never, a step or a directory. Nothing is changed yet."""
    if resume == "auto":
        return _newest(run)
    if resume == "never":
        return StartChoice(())
    if resume.isascii() and resume.isdigit():
        return _of_step(run, resume)
    return _at(Path(resume))


def read_first(choice: StartChoice, read: Callable[[Path], Read]) -> tuple[Read | None, list[str]]:
    """What `read` makes of the first checkpoint that is whole, and warnings that name those passed over.

    `read` raises `Damaged` on what is not as it was written. A named checkpoint has to do.
    """
    warnings = list(choice.warnings)
    for path in choice.paths:
        try:
            return read(path), warnings
        except Damaged as error:
            if choice.explicit:
                raise
            warnings.append(f"passed over: {error}")
    if choice.paths:
        raise _none_whole(warnings)
    return None, warnings


def give_up_after(run: Path, step: int) -> list[int]:
    """Clear what interrupted saves left, and move checkpoints later than `step` aside: their branch ends.

    It lists the directory, so that a start from an explicit path leaves it for the first save.
    """
    for kind in ("checkpoint", "snapshot"):
        sweep(folder_of(run, kind))
    try:
        return abandon_after(run, step)
    except OSError as error:
        what = f"a checkpoint later than step {step} cannot be moved aside: {error.strerror}"
        raise UserError(what, where=error.filename) from error


def _newest(run: Path) -> StartChoice:
    found = candidates(run)
    if not found.paths and published(run):
        raise _none_whole(found.reasons)
    given_up = sorted((run / "abandoned").glob("checkpoint-*"))
    if not found.paths and given_up:
        cure = f"--resume never to begin at step 1, or --resume {given_up[-1]} (a path)"
        raise UserError("its checkpoints are all in abandoned/", where=run, cure=cure)
    return StartChoice(tuple(found.paths), tuple(found.reasons))


def _of_step(run: Path, step: str) -> StartChoice:
    path = run / FOLDER / f"checkpoint-{step}"
    if step_of(path.name) is None or not path.is_dir():
        there = ", ".join(path.name.removeprefix("checkpoint-") for path in reversed(published(run)))
        raise UserError(f"no checkpoint of step {step}", where=run, cure=f"there are {there or 'none'}")
    return StartChoice((path,), explicit=True)


def _at(path: Path) -> StartChoice:
    """Nothing beside the path is looked at."""
    if not is_directory(path):
        raise UserError("no such checkpoint", where=path, cure="--resume auto, never, a step or a directory")
    if step_of(path.name, "snapshot") is not None:
        raise UserError("a snapshot holds weights only", where=path, cure="a new run with --init-from")
    return StartChoice((path,), explicit=True, foreign=is_foreign(path))


def _none_whole(reasons: list[str]) -> UserError:
    """Beginning anew unasked would look like a resume and lose everything."""
    return UserError(
        f"none of its checkpoints can be gone on from: {'; '.join(reasons)}",
        cure="--resume never to begin anew; they move to abandoned/",
    )
