"""From a config to a run that is ready: one straight line. Only this file sees the whole plan."""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from glm_accelerate.assemble.model import assemble
from glm_accelerate.assemble.prove import prove_all
from glm_accelerate.assemble.recipe import training_recipe
from glm_accelerate.checkpoint.format import MANIFEST
from glm_accelerate.checkpoint.lease import lease
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.pack import BY_TOKENS
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.observe.events import Observer
from glm_accelerate.observe.sinks import events_of
from glm_accelerate.optim.build import build_mover
from glm_accelerate.optim.mover import Mover
from glm_accelerate.optim.one_pass import keep_copies
from glm_accelerate.parallel.place import Axes, Place
from glm_accelerate.parallel.ranks import ALONE, Ranks
from glm_accelerate.parallel.shard import free
from glm_accelerate.plan.report import unusual
from glm_accelerate.prove.proof import Proof, require
from glm_accelerate.runtime.device import take_device
from glm_accelerate.runtime.host import give_back_memory, keep_freed_memory
from glm_accelerate.runtime.seed import repeat_exactly
from glm_accelerate.training.balance import balance_of, dealt_steps
from glm_accelerate.training.budget import budget_of
from glm_accelerate.training.evaluation import evaluation_of
from glm_accelerate.training.half import Half, in_half
from glm_accelerate.training.life import Branch, Life
from glm_accelerate.training.lock import take_lock
from glm_accelerate.training.loop import Run
from glm_accelerate.training.rehearsal import recompute_as_needed, rehearsal
from glm_accelerate.training.resume import Resumed, resume
from glm_accelerate.training.saver import saver_of
from glm_accelerate.training.settle import Settled, Start, settle, take_effect
from glm_accelerate.training.stages import StageBalance, stage_balance_of
from glm_accelerate.training.state import Progress
from glm_accelerate.training.step import forward_backward_of
from glm_accelerate.training.watch import held_already, keep_to_limit, neighbours, watch_over


@dataclass(frozen=True, slots=True)
class Built:
    """A run that is ready, and what a person should see before it starts."""

    run: Run
    proofs: Sequence[Proof]
    resumed: Resumed | None  # None: it begins


@contextmanager
def built(
    config: RunConfig,
    directory: Path,
    start: Start,
    observers: Sequence[Observer],
    on_read: Callable[[str, int, int], None] | None = None,
    ranks: Ranks = ALONE,
) -> Generator[Built, None, None]:
    """Everything from the files of a config to the first step; held until the run ends. In this order:

    1. The lock, before anything of the run is read: another process may be training it.
    2. All that is known without the model, before it is loaded: mistakes are reported in seconds.
    3. A lease on the checkpoint that the weights begin on, before it is read: its own run may delete it.
    4. Limits, determinism, the allocator, before the first tensor: they change nothing that exists.
    5. The model, the optimizer on weights that stay where they are, their state, then copies made of it.
    6. What follows from the state: recomputing by the memory that is left, float16's wide layers.
    7. Proofs on the weights that will be trained, before the directory changes: a refusal leaves no trace.
    8. The directory becomes what this start is; then its log, and all that writes to it.
    """
    with ExitStack() as held, ExitStack() as reading:
        begun, device = time.perf_counter(), take_device(None)
        held_before = held_already(device)
        ranks.decide(lambda: take_lock(directory, held))
        settled = settle(config, directory, start, ranks, on_read)
        config, plan = settled.config, settled.plan
        source = None if settled.choice.paths else settled.begun_on
        if source is not None and (source / MANIFEST).is_file():
            ranks.decide(lambda: reading.enter_context(lease(source)) and None)
        ranks.doing.phase = "loading the model"
        keep_freed_memory(gathers=plan.shards > 1)
        held.enter_context(repeat_exactly(device))
        keep_to_limit(config.memory.limit, device)
        place = Place(ranks, Axes.of(plan))
        assembled = assemble(training_recipe(config, plan, settled.files), device, place)
        model = assembled.model
        mover = build_mover(config.optim, plan, model, assembled.table, device)
        resumed, warnings = resume(settled, model, mover)
        progress = Progress() if resumed is None else resumed.progress
        keep_copies(mover.optimizer, model)
        sparing = recompute_as_needed(model, plan, place)
        half = in_half(model, progress, plan.compute, config)
        ranks.doing.phase = "proving"
        proofs = prove_all(config, settled.inputs, settled.model_dir, model, ranks)
        free(model)
        require(proofs)
        notes = [*assembled.notes, *ranks.decide(lambda: take_effect(settled, progress.position))]
        reading.close()
        give_back_memory()
        events = events_of(config, directory, settled.attempt, observers if ranks.first else None)
        life = Life(directory, settled.run_id, settled.attempt, place, events)
        if sparing is not None:
            events.emit("decision", {"step": progress.position, "said": sparing})
        _warn(settled, life, model, proofs, [*settled.mended, *notes, *warnings])
        stages = stage_balance_of(settled, life, model, progress, begun)
        run = _run(settled, life, model, mover, progress, half, stages, held_before)
        try:
            yield Built(run, proofs, resumed)
        finally:
            run.steps.close()
            events.close()


def _warn(settled: Settled, life: Life, model: Decoder, proofs: Sequence[Proof], known: list[str]) -> None:
    crowd = neighbours(model.embed.device) if life.ranks.first else []
    failed = [f"the proof of {one.name} failed: {one.said}" for one in proofs if not one.ok]
    odd = unusual(settled.config, model.sizes, int(settled.inputs.train.lengths.max()))
    life.warn(*known, *failed, *odd, *crowd)


def _run(
    settled: Settled,
    life: Life,
    model: Decoder,
    mover: Mover,
    progress: Progress,
    half: Half | None,
    stages: StageBalance | None,
    before: int,
) -> Run:
    config, plan, device = settled.config, settled.plan, model.embed.device
    away, zero = "activations" in plan.offload, config.parallel.zero
    passes = forward_backward_of(model, device, life.place, offload=away, zero=zero)
    balance = balance_of(settled, life, model, progress)
    budget = budget_of(settled, life, progress)

    def decide() -> None:
        for each in filter(None, (balance, budget)):
            each.at_save()

    branch = Branch(life, progress.position if settled.choice.paths else -1, settled.choice.explicit)
    return Run(
        config,
        plan,
        life,
        model,
        passes,
        mover,
        dealt_steps(settled, life, progress),
        progress,
        saver_of(settled, life, mover, progress, branch, decide, budget.wanted if budget else lambda: False),
        watch_over(plan, settled.inputs.train.lengths, device, before),
        evaluation_of(settled, model, mover, progress, branch, budget),
        half,
        balance,
        stages,
        rehearse=lambda: rehearsal(
            settled, life, model, passes, mover, progress.position, progress.dealing or BY_TOKENS
        ),
    )
