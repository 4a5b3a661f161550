"""A run's steps beside what the plan said of memory: drift is told once, running out in words that help."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from glm_accelerate.data.store import Int32s
from glm_accelerate.data.types import Step
from glm_accelerate.memory.monitor import MARGIN, Monitor, crowded, others_on, ran_out
from glm_accelerate.plan.hardware import detect
from glm_accelerate.plan.run_plan import RunPlan
from glm_accelerate.runtime.device import memory_in_use

BESIDE = 0.5  # on a CPU all of a process is seen, kernels that oneDNN keeps and libraries among it


@dataclass(frozen=True, slots=True)
class Watch:
    """`lengths`: of all samples, in tokens."""

    monitor: Monitor
    lengths: Int32s
    device: torch.device

    def drift(self, step: Step) -> str | None:
        """After a step: the warning, once."""
        return self.monitor.drift(step.number, memory_in_use(self.device))

    @contextmanager
    def over(self, step: Step) -> Generator[None, None, None]:
        """While a step runs."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            lengths = [int(self.lengths[number]) for number in step.numbers]
            in_use, others = memory_in_use(self.device), others_on(self.device)
            raise self.monitor.exhausted(step.number, lengths, in_use, others) from error


def watch_over(plan: RunPlan, lengths: Int32s, device: torch.device) -> Watch:
    """With the cure that the ladder has for this run."""
    assert plan.memory is not None
    cure = f"{plan.sparing} --accept config"
    margin = BESIDE if device.type == "cpu" else MARGIN
    return Watch(Monitor(plan.memory.watched(plan.device), cure, margin), lengths, device)


def neighbours(device: torch.device) -> list[str]:
    """Warnings at the start about others on the device."""
    said = crowded(others_on(device), device.type, detect().memory_bytes)
    return [] if said is None else [said]
