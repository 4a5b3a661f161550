"""What this machine has to train with, as plain facts. Looking costs a CUDA context and changes nothing."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from glm_accelerate.runtime.env import control_groups, cores
from glm_accelerate.runtime.processor import CPUINFO, has_bfloat16, has_tiles

MEMINFO = Path("/proc/meminfo")
DRIVER = Path("/proc/driver/nvidia/version")
# What a control group calls its limit, what is used of it, and what of that is given up when others want it:
# of the second kind of control groups, then of the first.
GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True, slots=True)
class Hardware:
    """One machine. On a CPU, the device's memory is the host's."""

    device: Literal["cuda", "cpu", "npu", "mlu"]
    name: str
    count: int
    memory_bytes: int  # of one device
    free_bytes: int
    cores: int
    host_bytes: int
    bf16: bool  # whether bfloat16 products are done in hardware
    cuda_version: str | None  # that torch was built with
    driver_version: str | None  # NVIDIA's, also where torch cannot use it
    threads: int = 0  # with which one process computes on the CPU; 0: as many as there are cores
    core_products: float = 0.0  # a second, of one core as measured in training; 0: not measured
    tiles: bool = False  # whether a CPU multiplies bfloat16 in tiles (AMX)
    assumed: bool = False  # not this machine: only its device is known

    @property
    def kind(self) -> str:
        """What people call such a device."""
        return "GPU" if self.device == "cuda" else self.device.upper()


def detect() -> Hardware:
    """The machine that this process runs on; with several GPUs, the current one speaks for all."""
    host, free = host_memory()
    common = (cores(), host)
    versions = (torch.version.cuda, driver_version())
    if not torch.cuda.is_available():
        return Hardware(
            "cpu",
            _cpu_name(),
            1,
            host,
            free,
            *common,
            has_bfloat16(),
            *versions,
            torch.get_num_threads(),
            tiles=has_tiles(),
        )
    device = torch.cuda.current_device()
    free, total = torch.cuda.mem_get_info(device)
    return Hardware(
        "cuda",
        torch.cuda.get_device_name(device),
        torch.cuda.device_count(),
        total,
        free,
        *common,
        torch.cuda.is_bf16_supported(including_emulation=False),
        *versions,
    )


def host_memory(meminfo: Path = MEMINFO, groups: Iterable[Path] | None = None) -> tuple[int, int]:
    """Bytes that this process may use, and how many of them are free, within every container around it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = total
    if meminfo.is_file():
        found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
        free = int(found[1]) * 1024 if found else total
    for group in control_groups("memory") if groups is None else groups:
        for limit, used, idle in GROUP_FILES:
            said = _number(group / limit)
            if said is not None:
                total = min(total, said)
                left = said - (_number(group / used) or 0) + _idle(group / "memory.stat", idle)
                free = min(free, max(0, left))
    return total, min(free, total)


def driver_version() -> str | None:
    """NVIDIA's kernel driver, if it is loaded."""
    if not DRIVER.is_file():
        return None
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", DRIVER.read_text())
    return found[1] if found else None


def _number(file: Path) -> int | None:
    """The one that a file holds; "max" is none."""
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdigit() else None


def _idle(file: Path, name: str) -> int:
    """Bytes of files that a group has read and that its memory keeps only as long as there is room."""
    found = re.search(rf"^{name} (\d+)$", file.read_text(), re.MULTILINE) if file.is_file() else None
    return int(found[1]) if found else 0


def _cpu_name() -> str:
    text = CPUINFO.read_text() if CPUINFO.is_file() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else "CPU"
