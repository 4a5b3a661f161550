"""The training loop. It builds nothing: `build.py` did, and observers only look on."""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.types import Step
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.observe.events import MOVED
from glm_accelerate.optim.mover import Mover
from glm_accelerate.optim.schedule import rate
from glm_accelerate.plan.run_plan import RunPlan
from glm_accelerate.runtime.device import device_of
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.seed import seed_all, step_seed
from glm_accelerate.training.balance import Balance
from glm_accelerate.training.evaluation import Evaluation
from glm_accelerate.training.half import Half, widen
from glm_accelerate.training.life import Life
from glm_accelerate.training.saver import Saver
from glm_accelerate.training.stages import StageBalance
from glm_accelerate.training.state import Progress
from glm_accelerate.training.step import ForwardBackward, StepOutcome, train_step
from glm_accelerate.training.stop import StopRequest
from glm_accelerate.training.watch import Watch


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of a run, built and ready."""

    config: RunConfig
    plan: RunPlan
    life: Life
    model: Decoder
    passes: ForwardBackward
    mover: Mover
    steps: Generator[Step, None, None]
    progress: Progress
    saver: Saver
    watch: Watch  # over memory
    evaluation: Evaluation | None
    half: Half | None  # in float16
    balance: Balance | None  # of ranks that take different samples
    stages: StageBalance | None  # of a pipeline
    rehearse: Callable[[], None]  # before the first step

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self.model.embed.device


def loop(run: Run, stop: StopRequest) -> str:
    """Train until the plan's last step or a request to stop. Returns the reason for stopping."""
    progress, plan, ranks, events = run.progress, run.plan, run.life.ranks, run.life.events
    if run.evaluation is not None and run.evaluation.decisions.stopped is not None:
        return "done"
    run.model.train()
    first = progress.position + 1
    for step in run.steps:
        began = time.perf_counter()
        ranks.doing.step, ranks.doing.phase = step.number, "training"
        device_of(run.device).reset_peak()
        usual = progress.level.usual
        outcome = take(run, step, run.rehearse if step.number == first else None)
        seconds = time.perf_counter() - began
        events.emit("step", _fields(run, step, outcome, seconds))
        _warn(run, step, outcome, usual)
        run.saver.check()
        failing = progress.bad_in_a_row >= run.config.train.max_bad_steps
        over = None  # why there is nothing more to train
        if run.evaluation is not None:
            ranks.doing.phase = "evaluating"
            over = run.evaluation.after(step.number, lambda: stop.asked)
        last = step.number == plan.steps or over is not None
        asked = stop.reason(step.number)  # asked late: a signal may have come during the evaluation
        stopping, due = ranks.total([asked is not None, run.saver.due(seconds)])
        if last or failing or stopping or due:
            ranks.doing.phase = "saving"
            ending = bool(last or failing or stopping)
            moved = not ending and run.stages is not None and run.stages.at_save()
            run.saver.save(final=ending or moved)
            if moved:
                return MOVED
        if failing:
            raise _not_finite(run, step)
        if over is not None:
            break
        if stopping and not last:
            return asked or "a signal to another rank"
    return "done"


def take(run: Run, step: Step, rehearse: Callable[[], None] | None = None) -> StepOutcome:
    """One step with what has to happen before it, its randomness, and the progress that it makes."""
    if run.half is not None:
        widen(run.half, step, run.progress, run.passes, run.life)
    if rehearse is not None:  # which layers are wide is known now
        rehearse()
    place = run.life.place
    seed_all(step_seed(run.config.train.seed, step.number, place.samples[0]))
    with run.watch.over(step):
        outcome = train_step(run.passes, run.mover, step, _rate(run), run.progress.loss_scale, place)
    for balance in (run.balance, run.stages):
        if balance is not None:
            balance.after(step)
    run.progress.record(step, outcome.applied, outcome.loss, run.config.precision.raise_after)
    return outcome


def _warn(run: Run, step: Step, outcome: StepOutcome, usual: float | None) -> None:
    """What a person should know of this step."""
    if (drift := run.watch.drift(step)) is not None:
        run.life.warn(drift)
    if run.progress.level.jumped == step.number:
        jump = f"the loss jumped from about {usual:.3g} to {outcome.loss:.3g} at step {step.number}"
        run.life.warn(f"{jump}: checkpoints are suspect until it is back")


def _not_finite(run: Run, step: Step) -> UserError:
    lowest = ", at the lowest loss scale" if run.half is not None else ""
    times = f"{run.progress.bad_in_a_row} steps in a row (up to step {step.number})"
    return UserError(
        f"gradients not finite {times}{lowest}",
        cure="a lower optim.learning_rate, a longer optim.warmup, or precision.compute=float32",
    )


def _rate(run: Run) -> float:
    """The learning rate of the next step: by the schedule, and as often lowered as evaluations asked for."""
    optim = run.config.optim
    times = 0 if run.evaluation is None else run.evaluation.decisions.lowered
    share = run.config.evaluate.lower_rate_by**times * rate(
        run.progress.applied,
        run.plan.steps,
        schedule=optim.schedule,
        warmup=run.plan.warmup_steps,
        decay=optim.decay,
        floor=optim.floor,
    )
    return optim.learning_rate * share


def _fields(run: Run, step: Step, outcome: StepOutcome, seconds: float) -> dict[str, object]:
    """The fields of the event `step`."""
    scaled = {} if run.half is None else {"loss_scale": outcome.scale}
    return {
        "step": step.number,
        "applied": outcome.applied,
        "epoch": step.epoch + (step.number - 1) % run.plan.steps_per_epoch / run.plan.steps_per_epoch,
        "loss": outcome.loss,
        "samples": len(step.numbers),
        "tokens": step.tokens,
        "targets": step.targets,
        "tokens_per_second": step.tokens / seconds,
        "learning_rate": outcome.rate,
        "grad_norm": outcome.grad_norm,
        "memory_bytes": device_of(run.device).peak(),
        "seconds": seconds,
        **scaled,
    }
