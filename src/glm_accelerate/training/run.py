"""A whole run: build it, train, and say how it ended."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from glm_accelerate.config.schema import RunConfig
from glm_accelerate.observe.events import Observer
from glm_accelerate.parallel.ranks import joined, peer_ended
from glm_accelerate.runtime.env import few_kernels
from glm_accelerate.training.build import Built, built
from glm_accelerate.training.loop import loop
from glm_accelerate.training.saver import AFTER_A_RANK, MOMENT
from glm_accelerate.training.settle import Start
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
    directory = Path(directory)
    began = time.perf_counter()
    with joined() as ranks, built(config, directory, start, observers, on_read, ranks) as ready:
        if on_built is not None and ranks.first:
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
        seconds = time.perf_counter() - began
        return Result(directory, run.progress.position, reason, seconds, dict(run.progress.losses))


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
