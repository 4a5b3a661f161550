"""What is killed: a process that saves step 1, says whom to trace, and saves step 2 when it is told to.

Each way to save is a function of a run directory and a wire to the process that kills.
"""

import os
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from glm_accelerate.checkpoint.checkpointer import Checkpointer, Save
from glm_accelerate.checkpoint.format import FOLDER, OPTIMIZER, WEIGHTS
from glm_accelerate.parallel.part import part_of
from glm_accelerate.runtime.files import sync, write_synced

Way = Callable[[Path, Connection], None]


def tensors(step: int) -> dict[str, dict[str, Tensor]]:
    """The state at a step: every number tells its step, and files are longer than a write buffer."""
    weight = torch.arange(60 * 70, dtype=torch.float32).reshape(60, 70) + 10_000 * step
    return {
        WEIGHTS: {"weight": weight, "bias": weight[0].to(torch.bfloat16)},
        OPTIMIZER: {f"{name}::exp_avg": weight[:50] / 8 for name in ("weight", "other")},
    }


def to_save(step: int, attempt: int = 1) -> Save:
    groups = {
        group: {name: part_of(tensor) for name, tensor in named.items()}
        for group, named in tensors(step).items()
    }
    return Save(step, attempt, groups, {"step": step}, {"model": "tiny"}, {})


def flat(step: int) -> dict[str, Tensor]:
    """The same for torch's DCP."""
    return {
        f"{group}.{name}": tensor for group, named in tensors(step).items() for name, tensor in named.items()
    }


def in_place(run: Path, wire: Connection) -> None:
    """Saves in the training process."""
    _saves(Checkpointer(run), wire, os.getpid)


def once_more(run: Path, wire: Connection) -> None:
    """The same, where an earlier save of step 2 was cut off and is in the way."""
    left = run / FOLDER / ".checkpoint-2.1"
    left.mkdir(parents=True, mode=0o700)
    for name in ("weights-0-of-1.safetensors", "state.json"):
        write_synced(left / name, b"cut off")
    for directory in (left, left.parent, run):
        sync(directory)
    in_place(run, wire)


def behind(run: Path, wire: Connection) -> None:
    """Saves in the writer process."""
    checkpointer = Checkpointer(run)
    checkpointer.stage(to_save(1).groups)
    _saves(checkpointer, wire, _only_child)


def dcp_in_place(run: Path, wire: Connection) -> None:
    """torch's DCP as it is used most: the same directory again."""
    warnings.simplefilter("ignore")  # that it is one process, and that it overwrites
    dcp.save(dict(flat(1)), checkpoint_id=run, no_dist=True)
    wire.send(os.getpid())
    wire.recv()
    dcp.save(dict(flat(2)), checkpoint_id=run, no_dist=True)
    wire.send(None)


def _saves(checkpointer: Checkpointer, wire: Connection, traced: Callable[[], int]) -> None:
    """Step 3 follows, whatever became of step 2; then it tells how all ended."""
    checkpointer.save(to_save(1), wait=True)
    wire.send(traced())
    waits = wire.recv()
    checkpointer.save(to_save(2), wait=waits)
    wire.send(None)
    wire.recv()
    while checkpointer.busy():
        time.sleep(0.005)
    checkpointer.save(to_save(3), wait=True)
    wire.send([(outcome.step, outcome.error) for outcome in checkpointer.close(5)])


def _only_child() -> int:
    return int(Path(f"/proc/self/task/{os.getpid()}/children").read_text())
