"""What steps of GLM-4-9B need at the most, beside what the plan foretells: every way to make it fit."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.gpu.finding import Finding
from benchmarks.memory.cases import PREDICTED, SMALL
from benchmarks.memory.tracked import measure
from glm_accelerate.kernels.choose import choose_form, facts_of
from glm_accelerate.memory.estimate import estimate
from glm_accelerate.memory.job import Job
from glm_accelerate.runtime.host import host_memory

WITHIN = 0.05
LITTLE = replace(SMALL, width=128, mlp_width=432, layers=2, heads=2, kv_heads=1, vocabulary=512)


def fits(device: torch.device, tiny: bool) -> Iterator[Finding]:
    """One finding a configuration: bytes that tensors take, foretold and counted."""
    form = choose_form(facts_of(device), torch.bfloat16, compiled=False)[0]
    for name, (asked, target) in PREDICTED.items():
        if asked.ranks > 1:
            continue
        job = replace(_little(asked) if tiny else asked, device=device.type, form=form)
        predicted = estimate(job)
        figures: dict[str, object] = {
            "predicted": predicted.allocated,
            "predicted, with what is assumed": predicted.peak,
            "asked for": target,
        }
        left_out = _left_out(job, predicted.host)
        if left_out is not None:
            yield Finding(f"memory, {name}", None, figures | {"left out": left_out})
            continue
        try:
            with TemporaryDirectory() as folder:
                figures["measured"] = most = measure(job, Path(folder))
            apart = most / predicted.allocated - 1
            well = tiny or abs(apart) <= WITHIN  # of some megabytes scratch memory is a large part
            yield Finding(f"memory, {name}", well, figures | {"apart": apart})
        except torch.OutOfMemoryError as error:
            yield Finding(f"memory, {name}", None, figures | {"out of memory": str(error).split(". ")[0]})
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _left_out(job: Job, host: int) -> str | None:
    """Why a configuration is not run here."""
    if job.device == "cpu" and job.optimizer == "adamw8bit":
        return "its updates are compiled for half a minute on a CPU"
    free = host_memory()[1]
    if host > free:
        return f"needs {host / 1e9:.0f} GB of host memory, {free / 1e9:.0f} are free"
    return None


def _little(job: Job) -> Job:
    return replace(job, sizes=LITTLE, pass_tokens=256, longest=256, learnt=256)
