"""NVIDIA's GPUs, and those that torch calls by the same name: their differences, and nvidia-smi's reports."""

import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from glm_accelerate.runtime.devices.record import Device
from glm_accelerate.runtime.host import Holder

DRIVER = Path("/proc/driver/nvidia/version")
HOLDERS = "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"
FREE = "--query-gpu=uuid,memory.free"
MIB = 1 << 20
PATIENCE = 10.0  # seconds for nvidia-smi to answer


class NoAnswer(Exception):
    """Why nvidia-smi gave no answer."""


class Nvidia(Device):
    """One GPU."""

    kind: ClassVar[str] = "cuda"
    label: ClassVar[str] = "GPU"
    software: ClassVar[str] = "CUDA"
    collectives: ClassVar[str] = "cpu:gloo,cuda:nccl"
    context_bytes: ClassVar[int] = 600 * MIB
    process_bytes: ClassVar[int] = 1500 * MIB
    float16: ClassVar[bool] = True
    wide_products: ClassVar[bool] = True
    gpu_kernels: ClassVar[bool] = True
    out_of_memory: ClassVar[tuple[str, ...]] = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    profiled: ClassVar[tuple[ProfilerActivity, ...]] = (ProfilerActivity.CPU, ProfilerActivity.CUDA)

    def capability(self) -> tuple[int, int]:
        return torch.cuda.get_device_capability(self.device)

    def bfloat16(self) -> bool:
        return torch.cuda.is_bf16_supported(including_emulation=False)

    def flash_attention(self) -> bool:
        return torch.backends.cuda.is_flash_attention_available()

    def holders(self) -> list[Holder]:
        with suppress(NoAnswer):  # a driver that hangs is the doctor's to name
            return rows_about(driver_table(HOLDERS, PATIENCE), self._uuid())
        return []

    def unclaimed(self) -> int:
        """Its driver is asked first: torch's own question takes half a gigabyte of the GPU."""
        with suppress(NoAnswer):
            free = free_by_uuid(driver_table(FREE, PATIENCE), self._uuid())
            if free is not None:
                return free
        return self.memory()[0]

    def lock_pages(self, memory: Tensor) -> str | None:
        runtime: Any = torch.cuda.cudart()
        error = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        if not int(error):
            return None
        with suppress(RuntimeError):  # CUDA keeps the error for the next kernel, which would raise it
            torch.zeros(1, device=self.device)
        return str(runtime.cudaGetErrorString(error))

    def unlock_pages(self, memory: Tensor) -> None:
        runtime: Any = torch.cuda.cudart()
        torch.cuda.check_error(int(runtime.cudaHostUnregister(memory.data_ptr())))

    def _uuid(self) -> str:
        return str(self.properties().uuid)


def torch_built_for() -> str | None:
    """The release of CUDA, if any."""
    return torch.version.cuda


def cards() -> list[tuple[str, tuple[int, int], list[str]]]:
    """Each GPU's name and capability, and the architectures that torch has code for."""
    arches = torch.cuda.get_arch_list()
    every = map(Nvidia, (torch.device(Nvidia.kind, number) for number in range(torch.cuda.device_count())))
    return [(card.name(), card.capability(), arches) for card in every]


def driver_version() -> str | None:
    """The kernel driver's version, if it is loaded, also where torch cannot use it."""
    if not DRIVER.is_file():
        return None
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", DRIVER.read_text())
    return match[1] if match else None


def driver_table(query: str, patience: float) -> list[list[str]]:
    """The rows of nvidia-smi's answer; none where it is not installed."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, query, "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=patience, check=False)
    except subprocess.TimeoutExpired as error:
        raise NoAnswer("nvidia-smi does not answer") from error
    if answer.returncode:
        raise NoAnswer(answer.stdout.strip())
    return [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()]


def free_by_uuid(rows: list[list[str]], uuid: str) -> int | None:
    """Free bytes of one GPU by the rows of `FREE`; None if it is not among them."""
    free = (int(row[1]) * MIB for row in rows if len(row) == 2 and row[1].isdigit() and _same(row[0], uuid))
    return next(free, None)


def rows_about(rows: list[list[str]], uuid: str) -> list[Holder]:
    """The processes on one GPU by the rows of `HOLDERS`."""
    return [
        Holder(int(pid), Path(name).name, int(used) * MIB)
        for gpu, pid, name, used in (row for row in rows if len(row) == 4)
        if _same(gpu, uuid) and pid.isdigit() and used.isdigit()
    ]


def _same(uuid: str, other: str) -> bool:
    return uuid.removeprefix("GPU-") == other.removeprefix("GPU-")
