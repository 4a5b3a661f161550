"""A run as `train` builds it, to be measured: in a directory that goes away, and nothing of it is kept."""

import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from glm_accelerate.config.load import override
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.data.inputs import Inputs, open_inputs
from glm_accelerate.models.locate import locate
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
def ready(config: RunConfig, steps: int, say: Say) -> Generator[Ready, None, None]:
    """Built for at least so many steps; neither evaluated nor saved. However few steps are measured, the plan
    is that of the whole run.
    """
    plan = resolve(config, ground_of(config, detect(), progress=preparing(say)))
    changes = ["data.dev=null", "observe.sinks=[]", f"precision.compile={'on' if plan.compile else 'off'}"]
    if plan.steps < steps:
        changes.append(f"train.steps={steps}")
    config = override(config, changes)
    say("building", 0, 1)
    device = current_device()
    device.reset_peak()
    before = device.peak()
    inputs = open_inputs(config.data, locate(config.model.path))
    with (
        tempfile.TemporaryDirectory(prefix="glm-accelerate-bench-") as directory,
        built(config, Path(directory) / "run", Start(), []) as trainer,
    ):
        say("building", 1, 1)
        trainer.run.model.train()
        yield Ready(trainer.run, inputs, before)
