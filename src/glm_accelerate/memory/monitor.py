"""A run's memory against what the plan had said: drift is told once, running out is told with what a person
needs to go on, and whoever else holds memory of the device is named at the start. Takes plain numbers.
"""

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.words import amount

MARGIN = 0.05  # beyond the prediction: more is told
FULL = 0.85  # of the prediction, held between steps: the next step has to do with what is free in there
SHARES = {"cpu": 0.5}  # of the memory, held by others: less is not told
SHARE = 0.1  # on other devices
NAMED = 3  # of the others at most
MIB = 1 << 20
PATIENCE = 10.0  # seconds for nvidia-smi to answer
# In errors that have no type of their own: of torch's CPU allocator, of CUDA beside torch's, of C++.
SAID = (
    "can't allocate memory",
    "not enough memory",
    "Cannot allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "bad_alloc",
)
HOLDERS = "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"
FREE = "--query-gpu=uuid,memory.free"
PROCESSES = Path("/proc")


@dataclass(frozen=True, slots=True)
class Holder:
    """Another process that holds memory of the device."""

    pid: int
    name: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid}) {amount(self.bytes)}"


@dataclass(slots=True)
class Monitor:
    """Watches a run. `predicted`: bytes at the most; `cure`: what is typed to need less."""

    predicted: int
    cure: str
    margin: float = MARGIN
    told: bool = False
    positions: int = 0  # of the largest pass of the step before

    def fragments(self, positions: int, held: int) -> bool:
        """Before a step on a CPU: whether it would find only holes that smaller passes have left between
        small things, and take more memory, so that `held` should be given back first. That costs a tenth of
        a step.
        """
        larger, self.positions = positions > self.positions, positions
        return larger and held > FULL * self.predicted

    def drift(self, step: int, peak: int) -> str | None:
        """The warning, the first time that a step's peak is well beyond the prediction."""
        beyond = peak / self.predicted - 1
        if self.told or beyond <= self.margin:
            return None
        self.told = True
        said = f"the {amount(self.predicted)} that the plan had said"
        likely = "likely memory that is free in pieces too small, or other libraries of this process"
        return f"step {step} needed {amount(peak)} at its most, {beyond:.0%} more than {said} ({likely})"

    def exhausted(
        self, step: int, lengths: Sequence[int], in_use: int, others: Sequence[Holder]
    ) -> UserError:
        """What to tell when a step ran out. `lengths`: of its samples; `in_use`: bytes, when it did."""
        held = f", others held {_together(others)}" if others else ""
        samples = f"{len(lengths)} samples of {min(lengths):,} to {max(lengths):,} tokens"
        said = f"the plan had said {amount(self.predicted)}{held}"
        what = f"out of memory in step {step}, {samples}: {amount(in_use)} were in use, {said}"
        return UserError(what, cure=f"{self.cure} goes on from the last checkpoint")


def ran_out(error: BaseException) -> bool:
    """Whether an error says that there was no memory left, on a device or the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in SAID)


def crowded(holders: Sequence[Holder], device: str, whole: int) -> str | None:
    """The warning, if others hold more than a share of the device's memory."""
    held = sum(holder.bytes for holder in holders)
    if held <= SHARES.get(device, SHARE) * whole:
        return None
    return f"other processes hold {amount(held)} of {amount(whole)}: {_together(holders)}"


def others_on(device: torch.device) -> list[Holder]:
    """Who else holds memory of the device, the largest first: by its driver, on a CPU by /proc."""
    if device.type == "cuda":
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        found: Iterable[Holder] = rows_about(_driver_table(HOLDERS), uuid)
    else:
        found = resident(PROCESSES)
    ours = os.getpgid(0)
    # A number that no process here has may be our own, as it is called outside of our container.
    others = (one for one in found if _group(one.pid) not in (ours, None))
    return sorted(others, key=lambda one: -one.bytes)


def free_on(device: torch.device) -> int:
    """Bytes of a GPU that nobody holds, in other containers neither. Its driver is asked first: torch's own
    question takes half a gigabyte of the GPU.
    """
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    said = free_by_uuid(_driver_table(FREE), uuid)
    return torch.cuda.mem_get_info(device)[0] if said is None else said


def free_by_uuid(table: str, uuid: str) -> int | None:
    """Of nvidia-smi's rows `uuid, memory.free [MiB]` what one GPU has; None if it is not there."""
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines() if line.count(",") == 1]
    return next(
        (
            int(free) * MIB
            for gpu, free in rows
            if gpu.removeprefix("GPU-") == uuid.removeprefix("GPU-") and free.isdigit()
        ),
        None,
    )


def rows_about(table: str, uuid: str) -> list[Holder]:
    """Of nvidia-smi's rows `gpu_uuid, pid, process_name, used_memory [MiB]` those about one GPU."""
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines() if line.count(",") == 3]
    return [
        Holder(int(pid), Path(name).name, int(used) * MIB)
        for gpu, pid, name, used in rows
        if gpu.removeprefix("GPU-") == uuid.removeprefix("GPU-") and pid.isdigit() and used.isdigit()
    ]


def resident(processes: Path) -> list[Holder]:
    """Every process, with what it holds of the host's memory."""
    found: list[Holder] = []
    for folder in processes.glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            lines = (folder / "status").read_text(encoding="utf-8", errors="replace").splitlines()
            said = dict(line.split(":", 1) for line in lines if ":" in line)
            if "VmRSS" in said:  # a thread of the kernel holds nothing
                found.append(
                    Holder(int(folder.name), said["Name"].strip(), int(said["VmRSS"].split()[0]) << 10)
                )
    return found


def _group(pid: int) -> int | None:
    """Of processes: ranks, workers and the writer are in ours. None: there is no such process here."""
    try:
        return os.getpgid(pid)
    except OSError:
        return None


def _together(holders: Sequence[Holder]) -> str:
    more = f" and {len(holders) - NAMED} more" if len(holders) > NAMED else ""
    return ", ".join(map(str, holders[:NAMED])) + more


def _driver_table(query: str) -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        said = subprocess.run(
            [tool, query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:  # a driver that hangs is the doctor's to name
        return ""
    return said.stdout if said.returncode == 0 else ""
