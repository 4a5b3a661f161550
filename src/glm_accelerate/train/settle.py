"""All that is known of a run before its model is loaded, the same on every rank."""

import json
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from glm_accelerate.checkpoint.find import candidates, resolve_path
from glm_accelerate.checkpoint.load import INIT_FROM
from glm_accelerate.checkpoint.publish import write_text
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.config.load import override
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.inputs import Inputs, open_inputs
from glm_accelerate.evaluate.metrics import metric_names
from glm_accelerate.models.adapt.files import is_adapter
from glm_accelerate.models.locate import locate
from glm_accelerate.models.weights import read_config
from glm_accelerate.observe.events import last_attempt
from glm_accelerate.parallel.ranks import Ranks
from glm_accelerate.plan.hardware import detect
from glm_accelerate.plan.resolve import Ground, fitting_plan
from glm_accelerate.plan.run_plan import RunPlan
from glm_accelerate.runtime.env import launched
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.train.directory import Choice, choose_start, keep_config
from glm_accelerate.train.fingerprints import fingerprints
from glm_accelerate.train.mismatch import check


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins, besides its config."""

    resume: str = "auto"  # auto, never, a step, or a checkpoint's directory
    init_from: Path | None = None  # an adapter, a Hugging Face directory or a checkpoint
    accept: frozenset[str] = frozenset()  # which differences to the run as it was are meant


@dataclass(frozen=True, slots=True)
class Settled:
    """All that is known before the model is loaded, the same on every rank."""

    config: RunConfig
    directory: Path
    start: Start
    ranks: Ranks
    choice: Choice
    attempt: int
    run_id: str
    model_dir: Path
    inputs: Inputs
    plan: RunPlan
    prints: dict[str, str]
    mended: list[str]  # prepared data that were damaged


def settle(
    config: RunConfig,
    directory: Path,
    start: Start,
    ranks: Ranks,
    on_read: Callable[[str, int, int], None] | None,
) -> Settled:
    """The first rank looks and decides; what it prepares the others find ready."""
    choice, attempt, run_id = _begin(config, directory, start, ranks)
    metric_names(config.evaluate.metrics)  # what cannot be computed is refused now
    model_dir = Path(ranks.decide(lambda: str(locate(config.model.path))))
    family, sizes, _ = read_config(model_dir)
    ranks.doing.phase = "preparing data"
    mended: list[str] = ranks.decide(lambda: open_inputs(config.data, model_dir, on_read).mended)
    place = launched()
    first_here = place is not None and place.local == 0 and not ranks.first  # on a machine with its own cache
    inputs = open_inputs(config.data, model_dir, check=first_here)

    def make_plan() -> dict[str, Any]:
        ground = Ground(family, sizes, inputs, detect(), ranks.count)
        try:
            return asdict(fitting_plan(_as_before(config, directory, choice, ranks.count), ground))
        except UserError:
            return asdict(fitting_plan(config, ground))

    plan = RunPlan.from_json(ranks.decide(make_plan))

    def record() -> dict[str, str]:
        begun = begun_on(directory)
        prints = fingerprints(config, plan, model_dir, inputs, ranks=ranks.count, begun_on=begun)
        if choice.paths and not choice.foreign:  # refused before the model is loaded
            check(Reader(choice.paths[0]).manifest.fingerprints, prints, choice.paths[0], start.accept)
        write_text(directory / "plan.json", json.dumps(asdict(plan), indent=2, ensure_ascii=False))
        return prints

    prints = ranks.decide(record)
    return Settled(
        config, directory, start, ranks, choice, attempt, run_id, model_dir, inputs, plan, prints, mended
    )


def _as_before(config: RunConfig, directory: Path, choice: Choice, ranks: int) -> RunConfig:
    """Passes and divisions decide in which order numbers are summed: where the config leaves them open, a run
    goes on with those that it began with, however much memory is free today.
    """
    path = directory / "plan.json"
    if not choice.paths or choice.foreign or not path.is_file():
        return config
    then, words = json.loads(path.read_text(encoding="utf-8")), list[str]()
    passes = Reader(choice.paths[0]).manifest.fingerprints.get("passes", "")
    if config.train.micro_tokens == "auto" and passes:
        words.append(f"train.micro_tokens={passes.split()[0]}")
    if config.parallel.shard == "auto" and then["ranks"] == ranks:
        words.append(f"parallel.shard={then['shards']}")
    if config.evaluate.where == "auto" and then.get("evaluate_where") in ("beside", "inline"):
        words.append(f"evaluate.where={then['evaluate_where']}")  # they ask for other numbers of samples
    return override(config, words)


def _begin(config: RunConfig, directory: Path, start: Start, ranks: Ranks) -> tuple[Choice, int, str]:
    """Where to go on, the number of this attempt, and the run's own name."""

    def find() -> dict[str, Any]:
        keep_config(directory, config, start.accept)
        choice = choose_start(directory, "auto" if _begun_by_this_job(directory) else start.resume)
        if not choice.paths:
            _remember_base(directory, start.init_from)
        return {
            "choice": asdict(choice) | {"paths": [str(path) for path in choice.paths]},
            "attempt": last_attempt(directory / "events.jsonl") + 1,
            "run_id": _run_id(directory),
        }

    said = ranks.decide(find)
    choice = said["choice"]
    paths, warnings = tuple(map(Path, choice["paths"])), tuple(choice["warnings"])
    return Choice(paths, warnings, choice["explicit"], choice["foreign"]), said["attempt"], said["run_id"]


def _begun_by_this_job(directory: Path) -> bool:
    """Whether the newest checkpoint is from an earlier attempt of the job that we are in: a launcher starts
    the same words again after a crash, and what they said of the beginning has been done.
    """
    said = launched()
    if said is None or said.job in ("", "none"):  # as torchrun calls every job that was given no name
        return said is not None and said.restart > 0
    newest = next(iter(candidates(directory).paths), None)
    return newest is not None and Reader(newest).manifest.facts.get("job") == said.job


def _run_id(directory: Path) -> str:
    """Whose checkpoints these are: only a run's own are ever deleted."""
    path = directory / "run_id"
    if not path.is_file():
        write_text(path, secrets.token_hex(16) + "\n")
    return path.read_text(encoding="ascii").strip()


def _remember_base(directory: Path, init_from: Path | None) -> None:
    """Whose weights a new run begins on, for those who open its checkpoints. An adapter is within them."""
    if init_from is None or is_adapter(init_from):
        (directory / INIT_FROM).unlink(missing_ok=True)
    else:
        whole = (init_from / "config.json").is_file()  # a model; else a checkpoint, or a run that may go on
        source = init_from if whole else resolve_path(init_from)
        write_text(directory / INIT_FROM, f"{source.resolve()}\n")


def begun_on(directory: Path) -> Path | None:
    """Whose weights the run began on, if not on the config's model."""
    said = directory / INIT_FROM
    return Path(said.read_text(encoding="utf-8").strip()) if said.is_file() else None
