"""From a config to a run that is ready: one straight line. Only this file sees the whole plan."""

import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from glm_accelerate.checkpoint.load import INIT_FROM, Parts, load_base, load_weights, read_parts
from glm_accelerate.checkpoint.publish import write_text
from glm_accelerate.checkpoint.retain import abandon_after, retain
from glm_accelerate.checkpoint.save import save
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.inputs import Inputs, open_inputs
from glm_accelerate.data.pipeline import steps
from glm_accelerate.evaluate.inline import InlineEvaluator
from glm_accelerate.models.adapt import adapt
from glm_accelerate.models.adapt.files import is_adapter, load_adapter
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.locate import locate
from glm_accelerate.models.weights import read_config
from glm_accelerate.observe.events import EventLog, Events, Observer, last_attempt
from glm_accelerate.observe.sinks import open_sinks
from glm_accelerate.optim.build import build_optimizer, load_optimizer_state, optimizer_state
from glm_accelerate.plan.hardware import detect
from glm_accelerate.plan.resolve import Ground, order_of, resolve
from glm_accelerate.plan.run_plan import RunPlan
from glm_accelerate.prove.proof import Proof
from glm_accelerate.prove.start import prove_parts, require
from glm_accelerate.runtime.device import pick_device
from glm_accelerate.train.directory import choose_start, keep_config
from glm_accelerate.train.fingerprints import check, fingerprints
from glm_accelerate.train.lock import only_trainer
from glm_accelerate.train.loop import Run
from glm_accelerate.train.state import Progress


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins, besides its config."""

    resume: str = "auto"  # auto, never, a step, or a checkpoint's directory
    init_from: Path | None = None  # an adapter, a Hugging Face directory or a checkpoint
    accept_changes: bool = False


@dataclass(frozen=True, slots=True)
class Built:
    """A run that is ready, and what a person should see before it starts."""

    run: Run
    proofs: Sequence[Proof]
    resumed: int | None  # the step that it goes on from


@contextmanager
def built(
    config: RunConfig,
    directory: Path,
    start: Start,
    observers: Sequence[Observer],
    on_read: Callable[[str, int, int], None] | None = None,
) -> Generator[Built, None, None]:
    """Everything from the files of a config to the first step; held until the run ends."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    with only_trainer(directory):
        keep_config(directory, config, start.accept_changes)
        checkpoint, warnings = choose_start(directory, start.resume)
        parts = read_parts(checkpoint) if checkpoint else None
        model_dir = locate(config.model.path)
        family, sizes, _ = read_config(model_dir)
        inputs = open_inputs(config.data, model_dir, on_read)
        plan = resolve(config, Ground(family, sizes, inputs, detect()))
        write_text(directory / "plan.json", json.dumps(asdict(plan), indent=2, ensure_ascii=False))
        prints = fingerprints(config, model_dir, inputs)
        if parts:
            warnings = [*warnings, *check(dict(parts.manifest.fingerprints), prints, checkpoint)]
            abandon_after(directory, parts.manifest.step)
        if parts is None:
            _remember_base(directory, start.init_from)
        model = _model(config, plan, model_dir, directory, start.init_from, parts)
        optimizer = build_optimizer(model.named_parameters(), config.optim)
        progress = Progress.from_json(parts.state) if parts else Progress()
        if parts:
            load_optimizer_state(optimizer, model.named_parameters(), parts.optimizer)
        proofs = prove_parts(config, model, inputs, model_dir)
        require(proofs)
        attempt = last_attempt(directory / "events.jsonl") + 1
        logs = [EventLog(directory / "events.jsonl"), EventLog(directory / "evals.jsonl", kinds=("eval",))]
        events = Events([*logs, *open_sinks(config.observe.sinks, directory, config), *observers], attempt)
        for warning in warnings:
            events.emit("warning", {"said": warning})
        run = Run(
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
            ),
            progress=progress,
            events=events,
            save=lambda: _save(run, directory, attempt, prints),
            evaluate=_evaluation(config, plan, inputs, directory, attempt, lambda: run),
        )
        try:
            yield Built(run, proofs, parts.manifest.step if parts else None)
        finally:
            run.steps.close()
            events.close()


def _remember_base(directory: Path, init_from: Path | None) -> None:
    """Whose weights a new run begins on, for those who open its checkpoints. An adapter is within them."""
    if init_from is None or is_adapter(init_from):
        (directory / INIT_FROM).unlink(missing_ok=True)
    else:
        write_text(directory / INIT_FROM, f"{init_from.resolve()}\n")


def _model(
    config: RunConfig,
    plan: RunPlan,
    model_dir: Path,
    directory: Path,
    init_from: Path | None,
    parts: Parts | None,
) -> Decoder:
    model = load_base(directory, model_dir, dtype=getattr(torch, plan.dtype), device=pick_device())
    model.compute = getattr(torch, plan.compute)
    model.recompute = plan.recompute
    adapt(model, config.adapt, config.train.seed)
    if parts:
        load_weights(model, parts.weights, "the checkpoint")
    elif init_from is not None and is_adapter(init_from):
        load_adapter(model, init_from)
    return model


def _save(run: Run, directory: Path, attempt: int, prints: dict[str, str]) -> None:
    """Publish a checkpoint, then let go of those that need not stay."""
    named = list(run.model.named_parameters())
    step = run.progress.position
    saved = save(
        directory,
        step,
        attempt,
        weights={name: parameter for name, parameter in named if parameter.requires_grad},
        optimizer=optimizer_state(run.optimizer, named),
        state=run.progress.to_json(),
        fingerprints=prints,
        facts={
            "template": run.plan.template,
            "method": run.config.adapt.method,
            "loss": run.progress.losses.get(step),
        },
    )
    keep = run.config.checkpoint
    retain(directory, run.progress.losses, keep.keep_last, keep.keep_best)
    run.events.emit(
        "checkpoint",
        {
            "step": step,
            "path": f"checkpoints/{saved.path.name}",
            "bytes": saved.bytes,
            "blocked_seconds": saved.seconds,
            "total_seconds": saved.seconds,
        },
    )


def _evaluation(
    config: RunConfig, plan: RunPlan, inputs: Inputs, directory: Path, attempt: int, run: Callable[[], Run]
) -> Callable[[], None] | None:
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
        run_dir=directory,
        attempt=attempt,
    )

    def evaluate() -> None:
        step = run().progress.position
        fields = evaluator.evaluate(run().model, step)
        loss = fields.get("loss")
        if isinstance(loss, float):
            run().progress.losses[step] = loss
        run().events.emit("eval", fields)

    return evaluate
