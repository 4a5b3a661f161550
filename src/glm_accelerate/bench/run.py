"""A run as `train` builds it, to be measured: in a directory that goes away, and nothing of it is kept."""

import tempfile
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from glm_accelerate.config.load import override
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.inputs import Inputs, open_inputs
from glm_accelerate.models.locate import locate
from glm_accelerate.parallel.ranks import ALONE, Ranks
from glm_accelerate.plan.ground import ground_of
from glm_accelerate.plan.hardware import detect
from glm_accelerate.plan.resolve import resolve
from glm_accelerate.runtime.device import current_device
from glm_accelerate.training.build import built
from glm_accelerate.training.loop import Run
from glm_accelerate.training.settle import Start

MEGABYTE = 10**6

Say = Callable[[str, int, int], None]  # the phase, how much of it is done, of how much


@dataclass(frozen=True, slots=True)
class Ready:
    """A run before its first step."""

    run: Run
    inputs: Inputs
    memory_before: int  # in use when nothing but libraries was loaded


def preparing(say: Say) -> Say:
    """Progress in bytes as `say` shows it. Small files, prepared at once, are not shown."""

    def progress(what: str, done: int, total: int) -> None:
        if total >= MEGABYTE:
            say(f"preparing {what}, MiB", done // MEGABYTE, total // MEGABYTE)

    return progress


@contextmanager
def ready(config: RunConfig, steps: int, say: Say, ranks: Ranks = ALONE) -> Generator[Ready, None, None]:
    """Built for at least so many steps; neither evaluated nor saved. However few steps are measured, the plan
    is that of the whole run.
    """

    def changes() -> list[str]:
        plan = resolve(config, ground_of(config, detect(), ranks.count, preparing(say)))
        compiled = f"precision.compile={'on' if plan.compile else 'off'}"
        longer = [f"train.steps={steps}"] if plan.steps < steps else []
        return ["data.dev=null", "observe.sinks=[]", "observe.notify=[]", compiled, *longer]

    config = override(config, ranks.decide(changes))
    say("building", 0, 1)
    device = current_device()
    device.reset_peak()
    before = device.peak()
    inputs = open_inputs(config.data, locate(config.model.path))
    with ExitStack() as held:
        directory: str = ranks.decide(
            lambda: held.enter_context(tempfile.TemporaryDirectory(prefix="glm-accelerate-bench-"))
        )
        trainer = held.enter_context(built(config, Path(directory) / "run", Start(), [], ranks=ranks))
        say("building", 1, 1)
        trainer.run.model.train()
        yield Ready(trainer.run, inputs, before)
