"""What a save of a config's state costs: for how long training waits, and how long until it is on disk,
beside one warm copy of the same bytes in host memory and `torch.save` of the same tensors.
"""

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from glm_accelerate.bench.report import Report, Table, now
from glm_accelerate.bench.run import Say, ready
from glm_accelerate.bench.step import machine, take_step
from glm_accelerate.checkpoint.checkpointer import Checkpointer, Save
from glm_accelerate.config.schema import RunConfig
from glm_accelerate.observe.chart import Bar
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.words import amount, duration, number
from glm_accelerate.training.state import Pieces, resume_tensors

LIMIT = 3600.0  # seconds that one save may take
POLL = 0.002


@dataclass(frozen=True, slots=True)
class Round:
    """Every way once, in seconds."""

    copy: float
    blocked: float
    total: float
    torch_save: float


@dataclass(frozen=True, slots=True)
class CheckpointFigures:
    """The rounds, and what was saved."""

    device: str
    method: str
    bytes: int
    tensors: int
    codec: str
    stage_seconds: float  # once at the start of a run
    first: float  # blocked seconds of the first save
    rounds: tuple[Round, ...]


def measure_checkpoint(config: RunConfig, rounds: int, say: Say) -> CheckpointFigures:
    """One step, so that the optimizer has its moments; then every way in turn, `rounds` times."""
    with (
        ready(config, 1, say) as prepared,
        tempfile.TemporaryDirectory(prefix="glm-accelerate-bench-") as directory,
    ):
        take_step(prepared)
        run = prepared.run
        pieces = resume_tensors(run.mover)
        tensors = {name: part.local for group in pieces.values() for name, part in group.items()}
        size = sum(part.local.nbytes for group in pieces.values() for part in group.values())
        with ExitStack() as stack:
            checkpointer = Checkpointer(Path(directory), codec=run.plan.codec, limit=LIMIT)
            stack.callback(checkpointer.close, 0.0)
            stage_seconds = _timed(lambda: checkpointer.stage(pieces))
            say("saving", 0, rounds + 1)
            first, _ = _save(checkpointer, 1, pieces)
            buffers = (torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8))
            measured: list[Round] = []
            for index in range(1, rounds + 1):
                say("saving", index, rounds + 1)
                copy = _timed(lambda: buffers[1].copy_(buffers[0]))
                blocked, total = _save(checkpointer, index + 1, pieces)
                plain = _timed(lambda: torch.save(tensors, Path(directory) / "torch-save"))
                measured.append(Round(copy, blocked, total, plain))
        return CheckpointFigures(
            device=machine(run).device,
            method=run.config.adapt.method,
            bytes=size,
            tensors=sum(map(len, pieces.values())),
            codec=run.plan.codec,
            stage_seconds=stage_seconds,
            first=first,
            rounds=tuple(measured),
        )


def _save(checkpointer: Checkpointer, step: int, pieces: Pieces) -> tuple[float, float]:
    """For how long training would have waited, and until the checkpoint was published."""
    checkpointer.save(Save(step, 1, pieces, {}, {}, {}))
    while checkpointer.busy():
        time.sleep(POLL)
    (outcome,) = checkpointer.outcomes()
    if outcome.error:
        raise UserError(f"the checkpoint could not be written: {outcome.error}")
    return outcome.blocked_seconds, outcome.total_seconds


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def checkpoint_report(figures: CheckpointFigures, config: str) -> Report:
    """Seconds, and how many warm copies they are."""
    ways = {
        "one warm copy": [one.copy for one in figures.rounds],
        "a save: training waits": [one.blocked for one in figures.rounds],
        "a save: until it is on disk": [one.total for one in figures.rounds],
        "torch.save: training waits": [one.torch_save for one in figures.rounds],
    }
    copies = [one.copy for one in figures.rounds]
    rows = [
        (
            name,
            duration(median(seconds)),
            f"{duration(min(seconds))} to {duration(max(seconds))}",
            number(median(one / copy for one, copy in zip(seconds, copies, strict=True))),
        )
        for name, seconds in ways.items()
    ]
    return Report(
        name="checkpoint",
        title=f"Checkpoints of {config}",
        about=(
            f"{now()}; {figures.device}",
            f"{amount(figures.bytes)} in {figures.tensors:,} tensors ({figures.method}), "
            f"codec {figures.codec}; {len(figures.rounds)} rounds; medians",
            f"once, at the start of a run: memory for the copy {duration(figures.stage_seconds)}; "
            f"the first save waited {duration(figures.first)}",
            "`torch.save` hashes and syncs nothing",
        ),
        tables=(Table("Seconds", ("", "median", "smallest to largest", "in warm copies"), tuple(rows)),),
        picture=tuple(Bar(name, median(each), duration(median(each))) for name, each in ways.items()),
        figures={"config": config, "date": now(), **asdict(figures)},
    )
