"""A whole run: build it, train, and say how it ended."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.observe.events import Observer
from glm_accelerate.parallel.ranks import joined, peer_ended
from glm_accelerate.runtime.env import few_kernels
from glm_accelerate.runtime.host import give_back_memory
from glm_accelerate.training.build import Built, built
from glm_accelerate.training.loop import loop
from glm_accelerate.training.saver import AFTER_A_RANK, MOMENT
from glm_accelerate.training.settle import Start
from glm_accelerate.training.signs import shown_signs
from glm_accelerate.training.stop import StopRequest

FRESH = Start()


@dataclass(frozen=True, slots=True)
class Result:
    """How a run ended."""

    directory: Path
    step: int
    reason: str  # "done", or the signal that stopped it
    seconds: float
    losses: dict[int, float]  # held-out loss by step

    @property
    def done(self) -> bool:
        return self.reason == "done"


def train(
    config: RunConfig,
    directory: Path | str = "runs/run",
    *,
    start: Start = FRESH,
    stop_after: int | None = None,
    observers: Sequence[Observer] = (),
    on_read: Callable[[str, int, int], None] | None = None,
    on_built: Callable[[Built], None] | None = None,
) -> Result:
    """Train as the config says. Run again on the same directory, it goes on where it stopped.

    `on_read` is called as data are prepared, `on_built` with the plan and the proofs before the first step.
    """
    few_kernels()  # as the command does: it counts until oneDNN compiles its first
    directory, began = Path(directory), time.perf_counter()
    with joined() as ranks:
        while True:
            ready = built(config, directory, start, observers, on_read, ranks)
            result, stages = _attempt(ready, stop_after, on_built if ranks.first else None)
            if not stages:
                return replace(result, seconds=time.perf_counter() - began)
            start, on_built = replace(start, resume="auto", stages=stages), None
            give_back_memory()


def _attempt(
    building: AbstractContextManager[Built],
    stop_after: int | None,
    on_built: Callable[[Built], None] | None,
) -> tuple[Result, tuple[int, ...]]:
    """From a start to an end, and the stages to go on with from its last checkpoint, if they move."""
    with building as ready, shown_signs(ready.run.life, ready.run.device):
        if on_built is not None:
            on_built(ready)
        run = ready.run
        events = run.life.events
        events.emit("start" if ready.resumed is None else "resume", _start_fields(ready))
        with StopRequest(stop_after) as stop:
            try:
                if run.evaluation is not None:
                    run.evaluation.begin(lambda: stop.asked, fresh=ready.resumed is None)
                reason = loop(run, stop)
            except BaseException as error:
                ended = isinstance(error, RuntimeError) and peer_ended(error)
                run.saver.abandon(rank_ended=ended)
                if run.evaluation is not None:
                    run.evaluation.close(AFTER_A_RANK if ended else MOMENT)
                raise
            run.saver.finish()
            if run.evaluation is not None and reason == "done":
                run.evaluation.finish(lambda: stop.asked)
                reason = stop.reason(-1) or reason
            elif run.evaluation is not None:
                run.evaluation.close(MOMENT)
            events.emit("stop", {"reason": reason, "step": run.progress.position})
        moved = () if run.stages is None else run.stages.moved
        return Result(run.life.run, run.progress.position, reason, 0.0, dict(run.progress.losses)), moved


def _start_fields(ready: Built) -> dict[str, object]:
    plan = ready.run.plan
    trained = sum(parameter.numel() for parameter in ready.run.model.parameters() if parameter.requires_grad)
    return {
        "step": ready.run.progress.position,
        "of": 0 if ready.resumed is None else ready.resumed.attempt,
        "steps": plan.steps,
        "family": plan.family,
        "method": ready.run.config.adapt.method,
        "device": plan.device,
        "ranks": plan.ranks,
        "shards": plan.shards,
        "trained_parameters": trained,
        "proofs": [{"name": proof.name, "ok": proof.ok, "said": proof.said} for proof in ready.proofs],
    }
