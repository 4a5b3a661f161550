"""One rank of a run, measured from inside: what it holds, the most it had resident, how long steps take.

The trainer's own parts in its own order; hooks around the optimizer's update are all that is added. It ends
after so many steps and saves nothing.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from benchmarks.race.job import Meter, memory_now, memory_peak
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.optim.mover import mover_of
from glm_accelerate.parallel.part import local_of
from glm_accelerate.parallel.ranks import joined
from glm_accelerate.training.build import built
from glm_accelerate.training.loop import Run, loop
from glm_accelerate.training.settle import Start
from glm_accelerate.training.stop import StopRequest


@dataclass(frozen=True)
class Task:
    """A run to measure. It travels to every rank."""

    config: dict[str, Any]
    run: str  # its directory, and where each rank writes what it measured
    steps: int


@dataclass(frozen=True)
class Measured:
    """Of one rank. Bytes; `before`: everything imported, nothing loaded."""

    parameters: int
    gradients: int
    moments: int
    before: int
    loading: int  # the peak until the first step
    training: int  # the peak from a step's beginning to its update's end
    wall_seconds: list[float]
    cpu_seconds: list[float]


class Enough(Exception):
    """All steps that were asked for are done."""


@dataclass
class Probe:
    """Looks at memory, clocks and tensors when a rank updates its weights."""

    run: Run
    steps: int
    meter: Meter = field(default_factory=Meter)
    training: int = 0
    held: tuple[int, int, int] = (0, 0, 0)

    @property
    def training_now(self) -> bool:
        """Moments are made by updates before the first step."""
        return self.run.life.ranks.doing.phase == "training"

    def before(self, optimizer: Optimizer, *_: object) -> None:
        """Now there are gradients and moments."""
        if not self.training_now:
            return
        named = list(self.run.model.named_parameters())
        gradients = [parameter.grad for _, parameter in named if parameter.grad is not None]
        moments = mover_of(optimizer).state(named).values()
        self.held = (size(parameter for _, parameter in named), size(gradients), size(moments))

    def after(self, *_: object) -> None:
        if not self.training_now:
            return
        self.meter.read()
        self.training = max(self.training, memory_peak())  # the loop sets it back when a step begins
        if len(self.meter.wall) == self.steps:
            raise Enough


def size(tensors: Iterable[Tensor]) -> int:
    """Bytes in this rank's own memory."""
    return sum(local_of(tensor).nbytes for tensor in tensors)


def measure(task: Task) -> int:
    """Entry of a rank, as `cli.train.one_rank` is of a real one."""
    before = memory_now()
    run_dir = Path(task.run)
    with (
        joined() as ranks,
        built(RunConfig.model_validate(task.config), run_dir, Start(), [], None, ranks) as ready,
    ):
        loading = memory_peak()
        run = ready.run
        probe = Probe(run, task.steps)
        run.mover.optimizer.register_step_pre_hook(probe.before)
        run.mover.optimizer.register_step_post_hook(probe.after)
        with suppress(Enough), StopRequest() as stop:
            loop(run, stop)
        assert len(probe.meter.wall) == task.steps, "ended early"
        run.saver.abandon(rank_ended=False)
        parameters, gradients, moments = probe.held
        measured = Measured(
            parameters,
            gradients,
            moments,
            before,
            loading,
            probe.training,
            probe.meter.wall_seconds(),
            probe.meter.cpu_seconds(),
        )
        (run_dir / f"measured-{ranks.rank}.json").write_text(json.dumps(asdict(measured)))
    return 0
