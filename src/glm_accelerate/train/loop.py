"""The training loop. It builds nothing: `build.py` did, and observers only look on."""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.types import Step
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.observe.events import Events
from glm_accelerate.optim.fused_backward import FusedBackward
from glm_accelerate.optim.schedule import rate
from glm_accelerate.parallel.ranks import Ranks
from glm_accelerate.plan.run_plan import RunPlan
from glm_accelerate.runtime.device import device_of
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.seed import seed_all, step_seed
from glm_accelerate.train.evaluation import Evaluation
from glm_accelerate.train.half import Half, settle
from glm_accelerate.train.saver import Saver
from glm_accelerate.train.state import Progress
from glm_accelerate.train.step import StepOutcome, update
from glm_accelerate.train.stop import StopRequest
from glm_accelerate.train.watch import Watch


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of a run, built and ready."""

    config: RunConfig
    plan: RunPlan
    device: torch.device
    model: Decoder
    optimizer: Optimizer
    steps: Generator[Step, None, None]
    progress: Progress
    events: Events
    saver: Saver
    ranks: Ranks
    watch: Watch  # over memory
    evaluation: Evaluation | None
    half: Half | None = None  # in float16
    rehearse: Callable[[], None] | None = None  # before the first step
    fused: FusedBackward | None = None  # weights move within the backward pass


def loop(run: Run, stop: StopRequest) -> str:
    """Train until the plan's last step or a request to stop. Returns the reason for stopping."""
    progress, plan, ranks = run.progress, run.plan, run.ranks
    if run.evaluation is not None and run.evaluation.stopped is not None:
        return "done"
    run.model.train()
    first = progress.position + 1
    for step in run.steps:
        began = time.perf_counter()
        ranks.doing.step, ranks.doing.phase = step.number, "training"
        device_of(run.device).reset_peak()
        if run.half is not None:
            settle(run.half, run.model, step, progress, run.device, ranks, run.events)
        if step.number == first and run.rehearse is not None:  # which layers are wide is known now
            run.rehearse()
        learning_rate = run.config.optim.learning_rate * _rate(run)
        scale = progress.scale.value if progress.scale is not None else 1.0
        seed_all(step_seed(run.config.train.seed, step.number, ranks.rank))
        with run.watch.over(step):
            outcome = update(
                run.model,
                run.optimizer,
                step,
                run.device,
                learning_rate=learning_rate,
                limit=run.config.optim.clip,
                ranks=ranks,
                scale=scale,
                offload="activations" in plan.offload,
                fused=run.fused,
            )
        seconds = time.perf_counter() - began
        usual = progress.level.usual
        progress.record(step, outcome.applied, outcome.loss, run.config.precision.raise_after)
        scaled = {"loss_scale": scale} if run.half is not None else {}
        run.events.emit("step", _fields(run, step, outcome, learning_rate, seconds) | scaled)
        _warn(run, step, outcome, usual)
        run.saver.heed()
        last = step.number == plan.steps
        failing = progress.bad_in_a_row >= run.config.train.max_bad_steps
        over = None  # why there is nothing more to train
        if run.evaluation is not None:
            ranks.doing.phase = "evaluating"
            over = run.evaluation.after(step.number, lambda: stop.asked)
        last = last or over is not None
        asked = stop.reason(step.number)  # asked late: a signal may have come during the evaluation
        stopping, due = ranks.total([asked is not None, run.saver.due(seconds)])
        if last or failing or stopping or due:
            ranks.doing.phase = "saving"
            run.saver.save(final=bool(last or failing or stopping))
        if failing:
            raise _not_finite(run, step)
        if over is not None:
            break
        if stopping and not last:
            return asked or "a signal to another rank"
    return "done"


def _warn(run: Run, step: Step, outcome: StepOutcome, usual: float | None) -> None:
    """What a person should know of this step."""
    said = [run.watch.drift(step)]
    if run.progress.level.jumped == step.number:
        jump = f"the loss jumped from about {usual:.3g} to {outcome.loss:.3g} at step {step.number}"
        said.append(f"{jump}: checkpoints are suspect until it is back")
    for sentence in filter(None, said):
        run.events.emit("warning", {"said": sentence})


def _not_finite(run: Run, step: Step) -> UserError:
    lowest = ", at the lowest loss scale" if run.half is not None else ""
    times = f"{run.progress.bad_in_a_row} steps in a row (up to step {step.number})"
    return UserError(
        f"gradients not finite {times}{lowest}",
        cure="a lower optim.learning_rate, a longer optim.warmup, or precision.compute=float32",
    )


def _rate(run: Run) -> float:
    optim = run.config.optim
    times = 0 if run.evaluation is None else run.evaluation.lowered
    return run.config.evaluate.lower_rate_by**times * rate(
        run.progress.applied,
        run.plan.steps,
        schedule=optim.schedule,
        warmup=run.plan.warmup_steps,
        decay=optim.decay,
        floor=optim.floor,
    )


def _fields(
    run: Run, step: Step, outcome: StepOutcome, learning_rate: float, seconds: float
) -> dict[str, object]:
    """The `step` event of the contract."""
    return {
        "step": step.number,
        "applied": outcome.applied,
        "epoch": step.epoch + (step.number - 1) % run.plan.steps_per_epoch / run.plan.steps_per_epoch,
        "loss": outcome.loss,
        "samples": len(step.numbers),
        "tokens": step.tokens,
        "targets": step.targets,
        "tokens_per_second": step.tokens / seconds,
        "learning_rate": learning_rate,
        "grad_norm": outcome.grad_norm,
        "memory_bytes": device_of(run.device).peak(),
        "seconds": seconds,
    }
