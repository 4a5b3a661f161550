"""From a config to a run that is ready: one straight line. Only this file sees the whole plan."""

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.optim import Optimizer

from glm_accelerate.assemble.foreign import read_foreign
from glm_accelerate.assemble.model import assemble
from glm_accelerate.assemble.recipe import ModelFiles, Recipe, training_recipe
from glm_accelerate.checkpoint.checkpointer import Checkpointer
from glm_accelerate.checkpoint.find import require_finite
from glm_accelerate.checkpoint.format import MANIFEST, Damaged
from glm_accelerate.checkpoint.lease import lease
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.pipeline import steps
from glm_accelerate.evaluate.statistics.decide import best
from glm_accelerate.kernels.native.build import load as native_library
from glm_accelerate.models.adapt.files import is_adapter
from glm_accelerate.models.bind import bind_operators
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.observe.events import EventLog, Events, Observer, read_past
from glm_accelerate.observe.sinks import open_sinks
from glm_accelerate.optim.build import build_optimizer
from glm_accelerate.optim.fused_backward import FusedBackward
from glm_accelerate.optim.one_pass import keep_copies
from glm_accelerate.parallel.ranks import ALONE, Ranks
from glm_accelerate.parallel.shard import free
from glm_accelerate.plan.resolve import order_of
from glm_accelerate.plan.unusual import unusual
from glm_accelerate.prove.proof import Proof
from glm_accelerate.prove.start import prove_inputs, prove_model, require
from glm_accelerate.runtime import env
from glm_accelerate.runtime.device import take_device
from glm_accelerate.runtime.host import give_back_memory, keep_freed_memory
from glm_accelerate.runtime.seed import repeat_exactly
from glm_accelerate.train.branch import Branch
from glm_accelerate.train.directory import make_ready, read_first
from glm_accelerate.train.evaluation import evaluation_of
from glm_accelerate.train.half import Half, in_half
from glm_accelerate.train.lock import only_trainer
from glm_accelerate.train.loop import Run
from glm_accelerate.train.mismatch import check
from glm_accelerate.train.rehearsal import rehearsal
from glm_accelerate.train.saver import Saver
from glm_accelerate.train.settle import Settled, Start, settle, take_effect
from glm_accelerate.train.sparing import recompute_as_needed
from glm_accelerate.train.state import Progress, moved, restore
from glm_accelerate.train.watch import held_already, keep_to_limit, neighbours, watch_over


@dataclass(frozen=True, slots=True)
class Built:
    """A run that is ready, and what a person should see before it starts."""

    run: Run
    proofs: Sequence[Proof]
    resumed: int | None  # the step that it goes on from
    saved_by: int  # the attempt that saved that; 0: none of this run


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
    with ExitStack() as held, ExitStack() as reading:
        device = take_device(None)
        held_before = held_already(device)

        def take() -> None:
            make_ready(directory)
            held.enter_context(only_trainer(directory))

        ranks.decide(take)
        settled = settle(config, directory, start, ranks, on_read)
        config = settled.config
        source = None if settled.choice.paths else settled.begun_on
        if source is not None and (source / MANIFEST).is_file():  # its run may delete it meanwhile
            ranks.decide(lambda: reading.enter_context(lease(source)) and None)
        ranks.doing.phase = "loading the model"
        keep_freed_memory()
        held.enter_context(repeat_exactly(device))
        keep_to_limit(config.memory.limit, device)
        model, notes = assemble(_recipe(settled), device, ranks)
        optimizer = _optimizer(settled, model, device)
        progress, saved_by, warnings = _go_on(settled, model, optimizer)
        keep_copies(optimizer, model)
        sparing = recompute_as_needed(model, settled.plan, ranks)
        resumed = None if progress is None else progress.position
        progress = progress or Progress()
        first, compute = config.precision.loss_scale, settled.plan.compute
        half = in_half(model, progress, compute=compute, first=first, seed=config.train.seed)
        ranks.doing.phase = "proving"
        proofs = _proofs(settled, model, ranks)
        free(model)
        require(proofs)
        notes += ranks.decide(lambda: take_effect(settled, progress.position))
        reading.close()
        give_back_memory()
        events = _events(settled, observers) if ranks.first else Events([], settled.attempt)
        if sparing is not None:
            events.emit("decision", {"step": progress.position, "said": sparing})
        crowd = neighbours(device) if ranks.first else []
        failed = [f"the proof of {one.name} failed: {one.said}" for one in proofs if not one.ok]
        odd = unusual(config, model.sizes, int(settled.inputs.train.lengths.max()))
        for warning in [*settled.mended, *notes, *warnings, *failed, *odd, *crowd]:
            events.emit("warning", {"said": warning})
        run = _run(settled, model, optimizer, progress, events, half, held_before)
        try:
            yield Built(run, proofs, resumed, saved_by)
        finally:
            run.steps.close()
            events.close()


def _proofs(settled: Settled, model: Decoder, ranks: Ranks) -> list[Proof]:
    """Those of files by the first rank for all: `transformers` takes half a second and 24 MB a process."""
    config, inputs = settled.config, settled.inputs
    made = ranks.decide(lambda: [asdict(one) for one in prove_inputs(config, inputs, settled.model_dir)])
    return [*(Proof(**one) for one in made), *prove_model(config, model, inputs.tokenizer)]


def _recipe(settled: Settled) -> Recipe:
    """What the model is made of."""
    choice, begin = settled.choice, settled.start.init_from
    adapter = begin if not choice.paths and begin is not None and is_adapter(begin) else None
    files = ModelFiles(settled.model_dir, settled.begun_on, adapter)
    return training_recipe(settled.config, settled.plan, files)


def _optimizer(settled: Settled, model: Decoder, device: torch.device) -> Optimizer:
    """Where the plan has it. If that is the host, weights come to the device from there, and narrower."""
    config, plan = settled.config, settled.plan
    native = model.form == "native"
    if "optimizer" not in plan.offload:
        return build_optimizer(model.named_parameters(), config.optim, native=native)
    native, compute = native_library() is None, model.compute
    made = build_optimizer(
        model.named_parameters(), config.optim, native=native, host=device, compute=compute
    )
    model.to(device)
    bind_operators(model, compiled=plan.compile)
    return made


def _go_on(settled: Settled, model: Decoder, optimizer: Optimizer) -> tuple[Progress | None, int, list[str]]:
    """Where the run stands after its state was put back, None at the beginning; the attempt that saved it, 0
    if none of this run did; and warnings.
    """
    ranks, choice, saved_by = settled.ranks, settled.choice, 0

    def read(path: Path) -> tuple[Progress, list[str]]:
        nonlocal saved_by
        if choice.foreign:
            foreign = read_foreign(path, settled.model_dir, settled.config.adapt, settled.directory)
            begun = bool(foreign.optimizer)  # else the weights alone go on, and a note says so
            restore(foreign.source, model, optimizer, ranks, path, begun=begun)
            return Progress(position=foreign.step, applied=foreign.step), foreign.notes
        with lease(path):
            reader = Reader(path)
            require_finite(path, reader.manifest)
            said = check(reader.manifest.fingerprints, settled.prints, path, settled.start.accept)
            told = Progress.from_json(reader.state())
            saved_by = reader.manifest.attempt if reader.manifest.run in ("", settled.run_id) else 0
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
        return None, 0, warnings
    progress, said = found
    return progress, saved_by, [*warnings, *said]


def _events(settled: Settled, observers: Sequence[Observer]) -> Events:
    directory, config = settled.directory, settled.config
    logs = [EventLog(directory / "events.jsonl"), EventLog(directory / "evals.jsonl", kinds=("eval",))]
    return Events([*logs, *open_sinks(config.observe.sinks, directory, config), *observers], settled.attempt)


def _run(
    settled: Settled,
    model: Decoder,
    optimizer: Optimizer,
    progress: Progress,
    events: Events,
    half: Half | None,
    held_before: int,
) -> Run:
    config, plan, ranks, inputs = settled.config, settled.plan, settled.ranks, settled.inputs
    said = env.launched()
    job = said.job if said is not None else ""
    first, named = progress.position if settled.choice.paths else -1, settled.choice.explicit
    branch = Branch(settled.directory, first, settled.attempt, ranks, named)
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
        best=lambda: best(progress.judging.prefix, config.evaluate.margin),
        branch=branch,
        hold=lambda: moved(model, optimizer, ranks),
        fingerprints=settled.prints,
        facts={"template": plan.template, "method": config.adapt.method, "job": job},
    )
    fused = FusedBackward(optimizer, model.parameters()) if plan.fuse_update else None
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
        watch=watch_over(plan, inputs.train.lengths, model.embed.device, held_before),
        evaluation=evaluation_of(settled, model, optimizer, progress, events, branch),
        half=half,
        rehearse=lambda: rehearsal(settled, model, optimizer, progress, events, fused),
        fused=fused,
    )
