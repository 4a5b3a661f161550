"""From a config to a run that is ready: one straight line. Only this file sees the whole plan."""

import json
import secrets
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from glm_accelerate.checkpoint.checkpointer import Checkpointer
from glm_accelerate.checkpoint.find import candidates, resolve_path
from glm_accelerate.checkpoint.foreign import read_foreign
from glm_accelerate.checkpoint.format import Damaged
from glm_accelerate.checkpoint.lease import lease
from glm_accelerate.checkpoint.load import INIT_FROM, load_base
from glm_accelerate.checkpoint.publish import write_text
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.inputs import Inputs, open_inputs
from glm_accelerate.data.pipeline import steps
from glm_accelerate.evaluate.inline import InlineEvaluator
from glm_accelerate.models.adapt import adapt
from glm_accelerate.models.adapt.files import is_adapter, load_adapter
from glm_accelerate.models.adapt.quantized import kind_of
from glm_accelerate.models.bind import bind_operators
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.float8 import float8_products
from glm_accelerate.models.locate import locate
from glm_accelerate.models.weights import part_reader, read_config
from glm_accelerate.observe.events import EventLog, Events, Observer, last_attempt, read_past
from glm_accelerate.observe.sinks import open_sinks
from glm_accelerate.optim.build import build_optimizer
from glm_accelerate.optim.one_pass import keep_copies
from glm_accelerate.parallel.ranks import ALONE, Ranks
from glm_accelerate.parallel.shard import fill, free, make_mesh, shard
from glm_accelerate.plan.hardware import detect
from glm_accelerate.plan.resolve import Ground, order_of, resolve
from glm_accelerate.plan.run_plan import RunPlan
from glm_accelerate.prove.proof import Proof
from glm_accelerate.prove.start import prove_parts, require
from glm_accelerate.runtime.device import keep_freed_memory, pick_device
from glm_accelerate.runtime.env import launched
from glm_accelerate.runtime.seed import repeat_exactly
from glm_accelerate.train.directory import (
    Choice,
    choose_start,
    give_up_after,
    keep_config,
    make_ready,
    read_first,
)
from glm_accelerate.train.fingerprints import fingerprints
from glm_accelerate.train.half import Half, in_half
from glm_accelerate.train.lock import only_trainer
from glm_accelerate.train.loop import Run
from glm_accelerate.train.mismatch import check
from glm_accelerate.train.saver import Saver
from glm_accelerate.train.state import Held, Progress, moved, restore


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins, besides its config."""

    resume: str = "auto"  # auto, never, a step, or a checkpoint's directory
    init_from: Path | None = None  # an adapter, a Hugging Face directory or a checkpoint
    accept: frozenset[str] = frozenset()  # which differences to the run as it was are meant


@dataclass(frozen=True, slots=True)
class Built:
    """A run that is ready, and what a person should see before it starts."""

    run: Run
    proofs: Sequence[Proof]
    resumed: int | None  # the step that it goes on from


@dataclass(frozen=True, slots=True)
class _Settled:
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


@contextmanager
def built(
    config: RunConfig,
    directory: Path,
    start: Start,
    observers: Sequence[Observer],
    on_read: Callable[[str, int, int], None] | None = None,
    ranks: Ranks = ALONE,
) -> Generator[Built, None, None]:
    """Everything from the files of a config to the first step; held until the run ends."""
    with ExitStack() as held:

        def take() -> None:
            make_ready(directory)
            held.enter_context(only_trainer(directory))

        ranks.decide(take)
        settled = _settle(config, directory, start, ranks, on_read)
        ranks.doing.phase = "loading the model"
        keep_freed_memory()
        repeat_exactly(pick_device())
        model, notes = _model(settled)
        optimizer = build_optimizer(model.named_parameters(), config.optim, native=model.form == "native")
        progress, warnings = _go_on(settled, model, optimizer)
        keep_copies(optimizer, model)
        resumed = None if progress is None else progress.position
        progress = progress or Progress()
        first, compute = config.precision.loss_scale, settled.plan.compute
        half = in_half(model, progress, compute=compute, first=first, seed=config.train.seed)
        ranks.doing.phase = "proving"
        proofs = prove_parts(config, model, settled.inputs, settled.model_dir)
        free(model)
        require(proofs)
        events = _events(settled, observers) if ranks.first else Events([], settled.attempt)
        for warning in [*notes, *warnings]:
            events.emit("warning", {"said": warning})
        run = _run(settled, model, optimizer, progress, events, half)
        try:
            yield Built(run, proofs, resumed)
        finally:
            run.steps.close()
            events.close()


def _settle(
    config: RunConfig,
    directory: Path,
    start: Start,
    ranks: Ranks,
    on_read: Callable[[str, int, int], None] | None,
) -> _Settled:
    """The first rank looks and decides; what it prepares the others find ready."""
    choice, attempt, run_id = _begin(config, directory, start, ranks)
    model_dir = Path(ranks.decide(lambda: str(locate(config.model.path))))
    family, sizes, _ = read_config(model_dir)
    ranks.doing.phase = "preparing data"
    ranks.decide(lambda: open_inputs(config.data, model_dir, on_read) and None)
    inputs = open_inputs(config.data, model_dir)

    def make_plan() -> dict[str, Any]:
        return asdict(resolve(config, Ground(family, sizes, inputs, detect(), ranks.count)))

    plan = RunPlan.from_json(ranks.decide(make_plan))

    def record() -> dict[str, str]:
        begun_on = _begun_on(directory)
        prints = fingerprints(config, plan, model_dir, inputs, ranks=ranks.count, begun_on=begun_on)
        if choice.paths and not choice.foreign:  # refused before the model is loaded
            check(Reader(choice.paths[0]).manifest.fingerprints, prints, choice.paths[0], start.accept)
        write_text(directory / "plan.json", json.dumps(asdict(plan), indent=2, ensure_ascii=False))
        return prints

    prints = ranks.decide(record)
    return _Settled(config, directory, start, ranks, choice, attempt, run_id, model_dir, inputs, plan, prints)


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


def _begun_on(directory: Path) -> Path | None:
    said = directory / INIT_FROM
    return Path(said.read_text(encoding="utf-8").strip()) if said.is_file() else None


def _model(settled: _Settled) -> tuple[Decoder, list[str]]:
    """On its device and divided as planned; and what is not as planned. A rank reads its own part alone,
    unless it has to merge first.
    """
    config, plan, start = settled.config, settled.plan, settled.start
    device, divided = pick_device(), plan.shards > 1
    merges = _begun_on(settled.directory) is not None
    first = device if not divided else torch.device("cpu" if merges else "meta")
    quantized = kind_of(config.adapt)
    dtype: torch.dtype = getattr(torch, config.model.dtype if quantized else plan.dtype)
    model = load_base(settled.directory, settled.model_dir, dtype=dtype, device=first, quantized=quantized)
    model.compute = torch.bfloat16 if plan.compute == "fp8" else getattr(torch, plan.compute)
    model.recompute = plan.recompute
    adapt(model, config.adapt, config.train.seed)
    if not settled.choice.paths and start.init_from is not None and is_adapter(start.init_from):
        load_adapter(model, start.init_from)
    left = float8_products(model) if plan.compute == "fp8" else []
    if divided:
        mesh = make_mesh(device, settled.ranks.count, plan.shards)
        shard(model, list(model.layers), ["hidden"], mesh)
        if first.type == "meta":
            fill(model, part_reader(model), device, settled.ranks)
    bind_operators(model, compiled=plan.compile)  # it asks on which device the model is
    stay = "in bfloat16: 8-bit products go along multiples of 16"
    return model, [f"{len(left)} layers, as {left[0]}, stay {stay}"] if left else []


def _go_on(settled: _Settled, model: Decoder, optimizer: Optimizer) -> tuple[Progress | None, list[str]]:
    """Where the run stands after its state was put back, and warnings; None at the beginning."""
    ranks, choice = settled.ranks, settled.choice

    def read(path: Path) -> tuple[Progress, list[str]]:
        if choice.foreign:
            foreign = read_foreign(path, settled.model_dir, settled.config.adapt, settled.directory)
            restore(Held.of(foreign), model, optimizer, ranks, path)
            return Progress(position=foreign.step, applied=foreign.step), foreign.notes
        with lease(path):
            reader = Reader(path)
            said = check(reader.manifest.fingerprints, settled.prints, path, settled.start.accept)
            told = Progress.from_json(reader.state())
            restore(reader, model, optimizer, ranks, path, begun=told.applied > 0)
            return told, said

    def read_together(path: Path) -> tuple[Progress, list[str]]:
        """Each rank reads its own parts; one that finds damage speaks for all."""
        found, damage = None, None
        try:
            found = read(path)
        except Damaged as error:
            damage = error
        damaged = any(ranks.total([damage is not None]))
        if damage is not None:
            raise damage
        if damaged or found is None:
            raise Damaged("damaged, as another rank found", where=path)
        return found

    found, warnings = read_first(choice, read_together)
    if found is None:
        return None, warnings
    progress, said = found
    if not choice.explicit:  # else the first save does it: until then no directory is read
        ranks.decide(lambda: give_up_after(settled.directory, progress.position))
    return progress, [*warnings, *said]


def _events(settled: _Settled, observers: Sequence[Observer]) -> Events:
    directory, config = settled.directory, settled.config
    logs = [EventLog(directory / "events.jsonl"), EventLog(directory / "evals.jsonl", kinds=("eval",))]
    return Events([*logs, *open_sinks(config.observe.sinks, directory, config), *observers], settled.attempt)


def _run(
    settled: _Settled,
    model: Decoder,
    optimizer: Optimizer,
    progress: Progress,
    events: Events,
    half: Half | None,
) -> Run:
    config, plan, ranks, inputs = settled.config, settled.plan, settled.ranks, settled.inputs
    said = launched()
    job = said.job if said is not None else ""
    saver = Saver(
        run=settled.directory,
        checkpointer=Checkpointer(
            settled.directory, rank=ranks.rank, ranks=ranks.count, codec=plan.codec, run_id=settled.run_id
        ),
        ranks=ranks,
        events=events,
        section=config.checkpoint,
        past=read_past(settled.directory / "events.jsonl"),
        last_step=plan.steps,
        attempt=settled.attempt,
        run_id=settled.run_id,
        progress=progress,
        branch=progress.position if settled.choice.explicit else None,
        hold=lambda: moved(model, optimizer, ranks),
        fingerprints=settled.prints,
        facts={"template": plan.template, "method": config.adapt.method, "job": job},
    )
    return Run(
        config=config,
        plan=plan,
        device=model.embed.device,
        model=model,
        optimizer=optimizer,
        steps=steps(
            inputs.train,
            order_of(inputs, config, plan.step_samples),
            batching=config.data.batching,
            micro_tokens=plan.micro_tokens,
            position=progress.position,
            total=plan.steps,
            rank=ranks.rank,
            ranks=ranks.count,
        ),
        progress=progress,
        events=events,
        saver=saver,
        ranks=ranks,
        evaluate=_evaluation(settled, model, progress, events),
        half=half,
    )


def _evaluation(
    settled: _Settled, model: Decoder, progress: Progress, events: Events
) -> Callable[[], None] | None:
    config, plan, inputs = settled.config, settled.plan, settled.inputs
    if inputs.dev is None or not plan.evaluate_every:
        return None
    evaluator = InlineEvaluator(
        held_out=inputs.dev,
        samples=plan.evaluate_samples,
        micro_tokens=plan.micro_tokens,
        tokenizer=inputs.tokenizer,
        stops=inputs.stops,
        metrics=config.evaluate.metrics,
        max_new_tokens=config.evaluate.max_new_tokens,
        run_dir=settled.directory,
        attempt=settled.attempt,
        publishes=settled.ranks.first,
    )

    def evaluate() -> None:
        fields = evaluator.evaluate(model, progress.position)
        free(model)
        loss = fields.get("loss")
        if isinstance(loss, float):
            progress.losses[progress.position] = loss
        events.emit("eval", fields)

    return evaluate
