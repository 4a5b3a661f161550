"""What a run takes besides its tensors on this machine, and how fast it trains: measured, not assumed.

A child process (training/probe.py) starts as the run would and trains blocks of its widths, as many as take
seconds; for a run of several ranks, as many copies of it at the same time. Its answer is kept: runs of the
same model, data and adapter ask a machine once.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from glm_accelerate.config.load import absolute
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.memory.estimate import estimate
from glm_accelerate.memory.job import Job
from glm_accelerate.plan.cost import CORE_PLAIN, Speed, Work, pairs, run_seconds
from glm_accelerate.plan.ground import Ground, MachineMeasurement
from glm_accelerate.plan.resolve import plan_and_weigh
from glm_accelerate.runtime.env import cores, granted_threads, launched
from glm_accelerate.runtime.files import private_folder, write_text
from glm_accelerate.runtime.host import processor_flags

Progress = Callable[[str, int, int], None] | None  # hears what is done, how much, of how much
CHILD = "glm_accelerate.training.probe"
BEGIN = (  # before torch loads
    "from glm_accelerate.runtime.child import end_with_parent; end_with_parent()\n"
    "from glm_accelerate.runtime.env import share_cores; share_cores({together})\n"
    "from {child} import main; main()"
)
BLOCKS = 2  # at least
PARTS = {"model", "data", "adapt", "optim", "prove"}  # of a config: what is measured follows from these
RATES = {"learning_rate", "schedule", "warmup", "decay", "floor", "weight_decay"}  # ... but not from these
# Seconds of a run, at the speed of a slow core: a shorter one is over sooner than it is measured.
WORTH = 10.0
LONGEST = 6.0  # seconds of a step of the probe, at that speed
FEW = 0.125  # of the targets, in passes that tell what the head takes
PATIENCE = 600.0  # seconds for all of it, on a machine that has much else to do


@dataclass(frozen=True, slots=True)
class Answer:
    """Of the child: how many copies of it trained at the same time; of the first, the most bytes of its
    process, and seconds of passes: the largest, one half as large, one with few of the targets, and the
    first of all, which compiles.
    """

    together: int
    bytes: int
    seconds: float
    half: float
    few: float
    first: float


def measured_ground(config: RunConfig, ground: Ground, progress: Progress = None) -> Ground:
    """The ground with what was measured on it, where a run is long enough to be worth it. What is measured
    may tell that compiling pays after all: then it is measured again.
    """
    hardware = ground.hardware
    if hardware.device != "cpu" or hardware.assumed:
        return ground
    while True:
        _, weighed = plan_and_weigh(config, ground)
        job = weighed.found.setting.job
        if job.form in (each.form for each in ground.measured):
            break
        slow = Speed(CORE_PLAIN * (hardware.threads or hardware.cores), 1e12, "")
        if run_seconds(job, weighed.ladder.work, slow) < WORTH:
            break
        found = _measure(config, job, slow, hardware.free_bytes, progress)
        if found is None:
            break
        threads = min(hardware.threads or hardware.cores, hardware.cores / found.together)
        core = found.products / threads
        hardware = replace(hardware, core_products=core)
        ground = replace(ground, measured=(*ground.measured, found), hardware=hardware)
    return ground


def short(job: Job, slow: Speed) -> tuple[Job, Work]:
    """A step of the model on one rank, and what it computes: of fewer blocks, and then of fewer tokens, where
    all of it would take too long.
    """
    small = replace(
        job, ranks=1, tensor=1, context=1, gathered=0, shards=1, stages=(), passes=min(2, job.passes)
    )

    def long() -> bool:
        return run_seconds(small, _work(small), slow) > LONGEST

    while long() and small.sizes.layers > BLOCKS:
        layers = small.sizes.layers - 1
        small = replace(small, sizes=replace(job.sizes, layers=layers), last=min(job.last, layers))
    while long() and small.pass_tokens > 128:
        tokens = small.pass_tokens // 128 * 64
        longest, learnt = min(tokens, small.longest), min(tokens, small.learnt)
        small = replace(small, pass_tokens=tokens, longest=longest, learnt=learnt)
    return small, _work(small)


def _work(job: Job) -> Work:
    whole, rest = divmod(job.pass_tokens, job.longest)
    seen = pairs([job.longest] * whole + ([rest] if rest else []))
    return Work(job.passes * float(job.pass_tokens), job.passes * seen, job.passes * float(job.learnt), 1)


def _measure(
    config: RunConfig, job: Job, slow: Speed, free: int, progress: Progress
) -> MachineMeasurement | None:
    small, work = short(job, slow)
    tensors = estimate(small).allocated
    place = launched()
    together = job.processes if place is None else place.here
    if small.offload or 2 * tensors * together > free:
        return None
    parts = absolute(config).model_dump(mode="json", include=PARTS, exclude={"optim": RATES})
    asked = {"config": parts, "job": asdict(small) | {"offload": []}, "together": together}
    answer = _ask(json.dumps(asked, sort_keys=True), together, progress)
    if answer is None:
        return None
    # Operations, as the forecast counts them: of the blocks, and of the head.
    blocks = run_seconds(small, replace(work, targets=0.0), Speed(1.0, float("inf"), ""))
    head = run_seconds(small, work, Speed(1.0, float("inf"), "")) - blocks
    head_seconds = min(max(0.0, answer.seconds - answer.few) / (1 - FEW), 0.9 * answer.seconds)
    block_seconds = answer.seconds - head_seconds
    fixed = min(max(0.0, 2 * answer.half - answer.seconds), block_seconds / 2)  # however few tokens
    return MachineMeasurement(
        job.form,
        max(0, answer.bytes - tensors),
        tensors,
        blocks / (block_seconds - fixed),
        head / head_seconds if head_seconds else float("inf"),
        max(0.0, answer.first - answer.seconds),
        fixed / small.sizes.layers / small.passes,
        answer.together,
    )


def _ask(asked: str, together: int = 1, progress: Progress = None) -> Answer | None:
    """The child's answer, from before if it has been asked."""
    threads = granted_threads() or max(1, cores() // together)
    machine = "\n".join([torch.__version__, str(threads), *sorted(processor_flags())])
    source = b"".join(path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py")))
    key = hashlib.sha256(machine.encode() + asked.encode() + source).hexdigest()[:32]
    try:
        kept = private_folder("measured") / f"{key}.json"
    except PermissionError:
        return None
    with suppress(OSError, ValueError, TypeError):  # none, or a damaged one
        return Answer(**json.loads(kept.read_bytes()))
    if progress is not None:
        progress("measuring what training takes here (kept for runs of this model and config)", 0, 0)
    # No module of where we happen to be; and what is wrong will be told by the run itself.
    command = [sys.executable, "-P", "-c", BEGIN.format(together=together, child=CHILD)]
    try:
        done = subprocess.run(
            command,
            input=asked.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        return None
    answer = Answer(**json.loads(done.stdout.splitlines()[-1]))
    with suppress(OSError):  # a cache that cannot be written costs time only
        write_text(kept, json.dumps(asdict(answer)), synced=False)
    return answer
