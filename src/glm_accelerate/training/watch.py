"""The memory of a run's steps: a warning when it drifts from the plan, and an error that helps."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from glm_accelerate.data.store import Int32s
from glm_accelerate.data.types import Step
from glm_accelerate.memory.estimate import PROCESS
from glm_accelerate.memory.job import ASSUMED
from glm_accelerate.memory.monitor import MARGIN, Monitor, crowded, others_on, ran_out
from glm_accelerate.plan.run_plan import RunPlan
from glm_accelerate.runtime.device import device_of
from glm_accelerate.runtime.env import launched
from glm_accelerate.runtime.host import give_back_memory, resident
from glm_accelerate.runtime.words import read_amount

BESIDE = 0.5  # on a CPU the whole process counts, with its libraries, of which much was assumed
HEAP = 0.1  # ... or measured: what the heap cannot use differs from run to run


@dataclass(frozen=True, slots=True)
class Watch:
    """Watches steps. `lengths`: of all samples, in tokens. `held`: bytes that are none of the run's."""

    monitor: Monitor
    lengths: Int32s
    device: torch.device
    held: int

    def drift(self, step: Step) -> str | None:
        """A warning after a step, once a run."""
        return self.monitor.drift(step.number, self._in_use())

    @contextmanager
    def over(self, step: Step) -> Generator[None, None, None]:
        """While a step runs."""
        positions = max((batch.tokens_RT.size for batch in step.batches), default=0)
        if self.device.type == "cpu" and self.monitor.fragments(positions, resident() - self.held):
            give_back_memory()
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            lengths = [int(self.lengths[number]) for number in step.numbers]
            in_use, others = self._in_use(), others_on(self.device)
            raise self.monitor.exhausted(step.number, lengths, in_use, others) from error

    def _in_use(self) -> int:
        return max(0, device_of(self.device).peak() - self.held)


def held_already(device: torch.device) -> int:
    """What this process holds before a run begins, as in a notebook, beyond what every one does. A rank was
    started for this run alone.
    """
    if launched() is not None:
        return 0
    give_back_memory()  # what a run before has freed is no data of somebody else's
    device_of(device).reset_peak()
    return max(0, device_of(device).peak() - (PROCESS if device.type == "cpu" else 0))


def keep_to_limit(limit: str, device: torch.device) -> None:
    """Hold tensors to `memory.limit`, which also counts what a driver takes."""
    most, record = read_amount(limit), device_of(device)
    if most is not None:  # not "auto"
        record.cap_memory(most - record.context_bytes)


def watch_over(plan: RunPlan, lengths: Int32s, device: torch.device, held: int) -> Watch:
    """The watch over a run, with the plan's cure. `held`: from `held_already`."""
    assert plan.memory is not None
    cure = f"{plan.sparing} --accept config"
    assumed = any(item.what == "process" and item.why.startswith(ASSUMED) for item in plan.memory.items)
    margin = MARGIN if device.type != "cpu" else BESIDE if assumed else HEAP
    return Watch(Monitor(plan.memory.watched(plan.device), cure, margin), lengths, device, held)


def neighbours(device: torch.device) -> list[str]:
    """Warnings at the start about others on the device."""
    warning = crowded(others_on(device), device.type, device_of(device).memory()[1])
    return [] if warning is None else [warning]
