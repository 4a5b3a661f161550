"""All that is known of a run before its model is loaded, the same on every rank."""

import json
import re
import secrets
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from glm_accelerate.assemble.recipe import ModelFiles
from glm_accelerate.checkpoint.codec import require_zstandard
from glm_accelerate.checkpoint.find import candidates, published, resolve_path
from glm_accelerate.checkpoint.made_with import fingerprints
from glm_accelerate.checkpoint.origin import INIT_FROM, adopt, begun_on, config_of
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.config.load import absolute, load_config, override, to_yaml
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.inputs import Inputs, open_inputs
from glm_accelerate.data.pack import Dealing
from glm_accelerate.data.pipeline import steps
from glm_accelerate.data.tokenizers import load_tokenizer
from glm_accelerate.data.types import Step
from glm_accelerate.evaluate.measuring.metrics import metric_names
from glm_accelerate.models.adapter_files import is_adapter, require_same
from glm_accelerate.models.locate import locate
from glm_accelerate.models.weights import read_config, weight_files
from glm_accelerate.observe.events import last_attempt
from glm_accelerate.observe.notices import addresses_of
from glm_accelerate.observe.sinks import require_packages
from glm_accelerate.parallel.alike import facts_of, model_digest, require_alike, require_shared
from glm_accelerate.parallel.place import Place
from glm_accelerate.parallel.ranks import Ranks
from glm_accelerate.plan.ground import Ground
from glm_accelerate.plan.hardware import detect
from glm_accelerate.plan.probe import measured_ground
from glm_accelerate.plan.resolve import fitting_plan, order_of, plan_and_weigh
from glm_accelerate.plan.run_plan import RunPlan
from glm_accelerate.runtime.device import current_device
from glm_accelerate.runtime.env import launched
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.files import write_text
from glm_accelerate.training.directory import StartChoice, check_config, choose_start, give_up_after
from glm_accelerate.training.lock import LOCK
from glm_accelerate.training.mismatch import check

RUN_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins, besides its config."""

    resume: str = "auto"  # auto, never, a step, or a checkpoint's directory
    init_from: Path | None = None  # an adapter, a Hugging Face directory or a checkpoint
    accept: frozenset[str] = frozenset()  # which differences to the run as it was are meant
    stages: tuple[int, ...] = ()  # how many layers each has from here on, if a run has just moved them


@dataclass(frozen=True, slots=True)
class Settled:
    """All that is known before the model is loaded, the same on every rank."""

    config: RunConfig
    directory: Path
    start: Start
    ranks: Ranks
    choice: StartChoice
    attempt: int
    run_id: str
    model_dir: Path
    inputs: Inputs
    plan: RunPlan
    prints: dict[str, str]
    mended: list[str]  # warnings about the data
    begun_on: Path | None  # whose weights the run begins on, if not on model_dir
    fits: Callable[[Sequence[int]], bool]  # on the first rank: whether it would with stages of so many layers

    @property
    def files(self) -> ModelFiles:
        """The files of the model."""
        paths, begin = self.choice.paths, self.start.init_from
        adapter = begin if not paths and begin is not None and is_adapter(begin) else None
        return ModelFiles(self.model_dir, self.begun_on, adapter)

    def steps(self, position: int, place: Place, dealing: Dealing) -> Generator[Step, None, None]:
        """This rank's batches of the steps after `position`."""
        rank, ranks = place.samples
        return steps(
            self.inputs.train,
            order_of(self.inputs, self.config, self.plan.step_samples),
            batching=self.config.data.batching,
            micro_tokens=self.plan.micro_tokens,
            position=position,
            total=self.plan.steps,
            rank=rank,
            ranks=ranks,
            context=place.axes.context,
            dealing=dealing,
        )


def settle(
    config: RunConfig,
    directory: Path,
    start: Start,
    ranks: Ranks,
    on_read: Callable[[str, int, int], None] | None,
) -> Settled:
    """The first rank looks and decides; what it prepares the others find ready. The run is not touched."""
    require_alike(ranks, facts_of(config))
    require_shared(ranks, directory / LOCK)
    config = absolute(config)
    choice, attempt, run_id, source = _begin(config, directory, start, ranks)
    metric_names(config.evaluate.metrics)  # what cannot be computed is refused now ...
    if config.checkpoint.codec == "zstd":  # ... and what cannot be written
        require_zstandard()
    ranks.decide(lambda: require_packages(config.observe.sinks))
    ranks.decide(lambda: addresses_of(config.observe.notify) and None)
    model_dir = Path(ranks.decide(lambda: str(locate(config.model.path))))
    family, sizes, _ = read_config(model_dir)
    if source is None:  # a model without weights is refused before anything takes long
        ranks.decide(lambda: weight_files(model_dir) and None)
    ranks.doing.phase = "preparing data"
    mended: list[str] = ranks.decide(lambda: open_inputs(config.data, model_dir, on_read).warnings)
    inputs = open_inputs(config.data, model_dir, check=_first_of_another_machine(ranks))
    require_alike(ranks, {"data": inputs.train.fingerprint, "model": model_digest(model_dir)})
    if source is not None and not choice.paths:
        ranks.decide(lambda: _require_alike(source, model_dir, inputs))

    grounds = list[Ground]()

    def make_plan() -> dict[str, Any]:
        job = launched()
        nodes = 1 if job is None or ranks.count % job.here else ranks.count // job.here
        ground = Ground(family, sizes, inputs, detect(), ranks.count, nodes=nodes)
        ground = measured_ground(config, ground, on_read)
        grounds.append(ground)
        try:
            kept = _as_before(config, directory, choice, ranks.count)
            kept = _with_stages(kept, start.stages) if start.stages else kept
            return asdict(_with_true_reasons(fitting_plan(kept, ground), config, kept))
        except UserError:
            return asdict(fitting_plan(config, ground))

    plan = RunPlan.from_json(ranks.decide(make_plan))

    def fits(stages: Sequence[int]) -> bool:
        asked = override(_with_stages(config, stages), [f"train.micro_tokens={plan.micro_tokens}"])
        return plan_and_weigh(asked, grounds[0])[1].memory.fits

    def record() -> dict[str, str]:
        base = source if choice.paths or _keeps_its_base(config) else None
        prints = fingerprints(config, plan, model_dir, inputs, ranks=ranks.count, begun_on=base)
        if choice.paths and not choice.foreign:  # refused before the model is loaded
            check(Reader(choice.paths[0]).manifest.fingerprints, prints, choice.paths[0], start.accept)
        return prints

    prints = ranks.decide(record)
    known = (config, directory, start, ranks, choice, attempt, run_id, model_dir, inputs)
    return Settled(*known, plan, prints, mended, source, fits)


def _first_of_another_machine(ranks: Ranks) -> bool:
    """Whether this rank alone looks into a machine's own cache."""
    job = launched()
    return job is not None and job.local == 0 and not ranks.first


def take_effect(settled: Settled, position: int) -> list[str]:
    """Write what this start is into the run directory, now that all checks have passed. For the first rank.

    `position`: the step that it goes on from. Returns warnings.
    """
    directory, source = settled.directory, settled.begun_on
    resumes, moved = bool(settled.choice.paths), list[int]()
    try:
        base = None
        if source is not None and not resumes and _keeps_its_base(settled.config):
            base = adopt(source, directory)
        if not settled.choice.explicit:  # else the first save does it: until then no directory is read
            moved = give_up_after(directory, position if resumes else -1)
        if base is not None:
            write_text(directory / INIT_FROM, f"{base}\n")
        elif not resumes:
            (directory / INIT_FROM).unlink(missing_ok=True)
        write_text(directory / "config.yaml", to_yaml(settled.config))
        write_text(directory / "plan.json", json.dumps(asdict(settled.plan), indent=2, ensure_ascii=False))
        write_text(directory / "run_id", f"{settled.run_id}\n")
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", where=error.filename or directory) from error
    return [f"checkpoints of steps {moved} are in abandoned/ now"] if moved else []


def _as_before(config: RunConfig, directory: Path, choice: StartChoice, ranks: int) -> RunConfig:
    """The config with what it leaves open as the run began: passes, divisions and operators decide in which
    order numbers are summed, whatever memory and speed the machine has today.
    """
    path = directory / "plan.json"
    if not choice.paths or choice.foreign or not path.is_file():
        return config
    overrides, asked = list[str](), config.parallel
    try:
        then = json.loads(path.read_text(encoding="utf-8"))
        ranks_then, where = then["ranks"], then.get("evaluate_where")
        tensor, stages = then.get("tensor", 1) * then.get("query", 1), then.get("stages", ())
        sizes = {"tensor": tensor, "pipeline": list(stages) or 1, "context": then.get("context", 1)}
        sizes["shard"] = then["shards"]
        compiled = then["compile"] if then["device"] == current_device().kind else None
    except (ValueError, KeyError, TypeError, AttributeError):  # damaged: the plan is made anew
        ranks_then, sizes, stages, where, compiled = None, dict[str, Any](), (), None, None
    passes = Reader(choice.paths[0]).manifest.fingerprints.get("passes", "")
    if config.train.micro_tokens == "auto" and passes:
        overrides.append(f"train.micro_tokens={passes.split()[0]}")
    if ranks_then == ranks:
        as_open = [*asked.open, *(["shard"] if asked.shard == "auto" else [])]
        moves = not asked.stages or asked.balance == "measured"
        if asked.size("pipeline") == len(stages) and moves:  # what a stage draws, for one, depends on its cut
            as_open.append("pipeline")
        overrides += [f"parallel.{axis}={sizes[axis]}" for axis in as_open]
    if config.evaluate.where == "auto" and where in ("beside", "inline"):
        overrides.append(f"evaluate.where={where}")  # they ask for other numbers of samples
    if config.precision.compile == "auto" and compiled is not None:
        kept = directory / "config.yaml"
        if (
            kept.is_file() and load_config(kept).train == config.train
        ):  # for a longer run it may pay after all
            overrides.append(f"precision.compile={'on' if compiled else 'off'}")
    return override(config, overrides)


def _with_stages(config: RunConfig, stages: Sequence[int]) -> RunConfig:
    """Of so many layers each."""
    return override(config, [f"parallel.pipeline={list(stages)}"])


def _with_true_reasons(plan: RunPlan, config: RunConfig, kept: RunConfig) -> RunPlan:
    """The plan with true reasons for what `_as_before` added: the user did not ask for it."""
    kept_as_begun = {
        "tokens in one pass": kept.train.micro_tokens != config.train.micro_tokens,
        "shards": kept.parallel.shard != config.parallel.shard,
        "tensor": kept.parallel.tensor != config.parallel.tensor,
        "context": kept.parallel.context != config.parallel.context,
        "where": kept.evaluate.where != config.evaluate.where,
        "compile": kept.precision.compile != config.precision.compile,
    }
    reasons = (
        replace(one, why="as the run began") if kept_as_begun.get(one.name) else one for one in plan.reasons
    )
    return replace(plan, reasons=tuple(reasons))


def _begin(
    config: RunConfig, directory: Path, start: Start, ranks: Ranks
) -> tuple[StartChoice, int, str, Path | None]:
    """Where to go on, the number of this attempt, the run's own name, and whose weights it begins on."""

    def find() -> dict[str, Any]:
        check_config(directory, config, start.accept)
        again = _begun_by_this_job(directory) and published(directory)
        choice = choose_start(directory, "auto" if again else start.resume)
        source = begun_on(directory) if choice.paths else _source(config, start.init_from)
        return {
            "choice": asdict(choice) | {"paths": [str(path) for path in choice.paths]},
            "attempt": last_attempt(directory / "events.jsonl") + 1,
            "run_id": _run_id(directory),
            "source": None if source is None else str(source),
        }

    found = ranks.decide(find)
    paths, warnings = tuple(map(Path, found["choice"].pop("paths"))), tuple(found["choice"].pop("warnings"))
    choice = StartChoice(paths, warnings, **found["choice"])
    return choice, found["attempt"], found["run_id"], Path(found["source"]) if found["source"] else None


def _begun_by_this_job(directory: Path) -> bool:
    """Whether the newest checkpoint is from an earlier attempt of the job that we are in: a launcher repeats
    the same command after a crash, and what it asks for at the beginning has been done.
    """
    job = launched()
    if job is None or job.job in ("", "none"):  # as torchrun calls every job that was given no name
        return job is not None and job.restart > 0
    newest = next(iter(candidates(directory).paths), None)
    return newest is not None and Reader(newest).manifest.facts.get("job") == job.job


def _run_id(directory: Path) -> str:
    """Whose checkpoints these are: only a run's own are ever deleted. A new one if it is gone or damaged."""
    try:
        run_id = (directory / "run_id").read_text(encoding="ascii").strip()
    except (FileNotFoundError, UnicodeDecodeError):
        run_id = ""
    return run_id if RUN_ID.fullmatch(run_id) else secrets.token_hex(16)


def _source(config: RunConfig, init_from: Path | None) -> Path | None:
    """Whose weights a new run begins on. An adapter is no base: it is within the run's own checkpoints."""
    if init_from is None:
        return None
    if is_adapter(init_from):
        require_same(init_from, config.adapt)
        return None
    whole = (init_from / "config.json").is_file()  # a model; else a checkpoint, or a run that may go on
    return (init_from if whole else resolve_path(init_from)).resolve()


def _require_alike(source: Path, model_dir: Path, inputs: Inputs) -> None:
    """Refuses weights of other sizes, or of another tokenizer, than the plan and the data are for."""
    whole = (source / "config.json").is_file()
    theirs = source if whole else locate(config_of(source).model.path)
    named = theirs if whole else f"the model of {source}"
    (family, sizes, _), (other, others, _) = read_config(model_dir), read_config(theirs)
    odd = [f"family {other.name}, not {family.name}"] if other.name != family.name else []
    odd += [
        f"{field.name} {getattr(others, field.name)}, not {getattr(sizes, field.name)}"
        for field in fields(sizes)
        if getattr(others, field.name) != getattr(sizes, field.name)
    ]
    has_words = any((theirs / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    if has_words and load_tokenizer(theirs, inputs.template.name).fingerprint != inputs.tokenizer.fingerprint:
        odd.append("another tokenizer")
    if odd:
        what = f"{named} is another model than model.path: {', '.join(odd)}"
        raise UserError(what, where=source, cure=f"model.path={theirs}")


def _keeps_its_base(config: RunConfig) -> bool:
    """Whether a checkpoint is not all of the model."""
    return config.adapt.method != "full"
