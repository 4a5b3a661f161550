"""What has to hold whenever a save was cut off, and what a run directory was found to hold."""

import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from kill_sweep.saver import flat, tensors, to_save
from torch.distributed.checkpoint.api import CheckpointException

from glm_accelerate.checkpoint import find
from glm_accelerate.checkpoint.checkpointer import Checkpointer
from glm_accelerate.checkpoint.format import FOLDER, LATEST, Damaged, step_of
from glm_accelerate.checkpoint.read import Reader
from glm_accelerate.checkpoint.retain import sweep
from tests.checkpoints import latest, verify


@dataclass(frozen=True)
class Verdict:
    """What a crash left. `faults` says, in words, which promises it broke."""

    left: str  # "step 1", "step 2", "neither" (loads, but as no step was) or "nothing"
    faults: list[str] = field(default_factory=list)


def ours(run: Path) -> Verdict:
    """As a crash left it: whatever bears a checkpoint's name is whole, and the newest of them is chosen."""
    faults: list[str] = []
    for path in (whole := find.published(run)):
        try:
            verify(path)
        except Damaged as error:
            faults.append(f"published and not whole: {error}")
    if not whole:
        return Verdict("nothing", ["no checkpoint is left"])
    chosen = find.candidates(run).paths
    if chosen[:1] != whole[:1]:
        faults.append(f"{chosen[:1]} is chosen, {whole[0]} is the newest")
    if not chosen:
        return Verdict("nothing", faults)
    left = _step(chosen[0])
    return Verdict(left, [*faults, *([] if left in ("step 1", "step 2") else [f"{left} is chosen"])])


def goes_on(run: Path) -> list[str]:
    """What is wrong in a new attempt: it sweeps, and saves the step that is missing."""
    folder = run / FOLDER
    sweep(folder)
    faults = [f"not swept: {name}" for name in leftovers(run)]
    step = max((step_of(path.name) or 0 for path in find.published(run)), default=0) + 1
    checkpointer = Checkpointer(run)
    checkpointer.save(to_save(step, attempt=2))
    (outcome,) = checkpointer.outcomes()
    faults += [f"the next save failed: {outcome.error}"] if outcome.error else []
    path, reasons = latest(run)
    pointer = (folder / LATEST).read_text().strip()
    if path is None or pointer != path.name or reasons or _step(path) != f"step {step}":
        faults.append(f"after the next save {path} is chosen, {LATEST} names {pointer}: {reasons}")
    return faults


def leftovers(run: Path) -> list[str]:
    """What saves left that are over."""
    return sorted(path.name for path in (run / FOLDER).iterdir() if path.name.startswith("."))


def torch_dcp(directory: Path) -> Verdict:
    """What DCP can load."""
    loaded = {name: torch.full_like(tensor, -1) for name, tensor in flat(1).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process
        try:
            dcp.load(loaded, checkpoint_id=directory, no_dist=True)
        except CheckpointException:
            return Verdict("nothing")
    for step in (1, 2):
        if all(torch.equal(tensor, loaded[name]) for name, tensor in flat(step).items()):
            return Verdict(f"step {step}")
    return Verdict("neither")


def _step(path: Path) -> str:
    """Which step's state it is, by every tensor and the rest of the state."""
    try:
        reader = Reader(path)
        said = reader.state()["step"]
        found = {group: reader.group(group) for group in tensors(said)}
    except Damaged:
        return "neither"
    for group, named in tensors(said).items():
        if found[group].keys() != named.keys():
            return "neither"
        if not all(torch.equal(found[group][name], tensor) for name, tensor in named.items()):
            return "neither"
    return f"step {said}"
