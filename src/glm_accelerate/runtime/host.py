"""The host: its memory (all of it, this process's, other processes'), and what its processor can do.

oneDNN and PyTorch each have a variable that makes them treat the processor as an older one. What we compile
and choose goes by the same, or a plan would count on products that never run.
"""

import ctypes
import os
import re
import resource
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from glm_accelerate.runtime.env import control_groups, processor_limits
from glm_accelerate.runtime.words import amount

MEMINFO, PROCESSES = Path("/proc/meminfo"), Path("/proc")
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# A control group's names for its limit, what is used of it, and what of that it gives up when others need it:
# in version 2 of control groups, then in version 1.
GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # of glibc's mallopt
GATHERED = 4 * 2**20  # bytes: most weights of models that are worth dividing
LARGE = 32 * 2**20  # bytes: glibc's own limit of what it may keep, where its program does not choose

CPUINFO = Path("/proc/cpuinfo")
BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}  # products in hardware: AVX-512, AMX, ARM
# The last of oneDNN's names for a processor without bfloat16 products, and without tiles.
NARROW = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
WITHOUT_TILES = (*NARROW, "AVX512_CORE_BF16", "AVX10_1_512", "AVX512_CORE_FP16")


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds memory of a device."""

    pid: int
    name: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid}) {amount(self.bytes)}"


def host_memory(meminfo: Path = MEMINFO, groups: Iterable[Path] | None = None) -> tuple[int, int]:
    """Bytes that this process may use in its containers, and how many of them are free."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = total
    if meminfo.is_file():
        match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
        free = int(match[1]) * 1024 if match else total
    for group in control_groups("memory") if groups is None else groups:
        for limit, used, idle in GROUP_FILES:
            most = _number(group / limit)
            if most is not None:
                total = min(total, most)
                left = most - (_number(group / used) or 0) + _idle(group / "memory.stat", idle)
                free = min(free, max(0, left))
    return total, min(free, total)


def keep_freed_memory(gathers: bool = False) -> None:
    """Keep the memory that a step frees for the next one. By default glibc returns it to the system, which
    clears thousands of pages again in each step: a tenth of a small model's time. The peak is the same, but
    where a step `gathers`: weights that come and go between gradients that stay would leave holes as large as
    the state, so blocks of their size are given back.
    """
    if (libc := _glibc()) is not None:
        libc.mallopt(MMAP_THRESHOLD, GATHERED if gathers else LARGE)
        libc.mallopt(TRIM_THRESHOLD, -1)
        libc.mallopt(ARENA_MAX, 1)  # memory freed by one thread (gloo's, the saver's) is for all


def give_back_memory() -> None:
    """Return freed memory to the system: no step needs what loading and factoring took."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def resident() -> int:
    """Bytes of this process in memory now, with freed ones that its heap keeps; 0: unknown."""
    return _status("VmRSS") or 0


def peak_resident() -> int:
    """The most bytes in memory since `reset_peak_resident`."""
    if (peak := _status("VmHWM")) is not None:
        return peak
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def reset_peak_resident() -> bool:
    """Start measuring anew. False where the system cannot: the peak then counts from the process's start."""
    if not RESET.exists():
        return False
    try:
        RESET.write_text("5")  # Linux: sets the high-water mark to what is resident now
    except OSError:  # some containers forbid it; the caller learns it from the result
        return False
    return True


def host_holders(processes: Path = PROCESSES) -> list[Holder]:
    """Every process, with its share of the host's memory."""
    holders: list[Holder] = []
    for folder in processes.glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            lines = (folder / "status").read_text(encoding="utf-8", errors="replace").splitlines()
            fields = dict(line.split(":", 1) for line in lines if ":" in line)
            if "VmRSS" in fields:  # a thread of the kernel holds nothing
                size = int(fields["VmRSS"].split()[0]) << 10
                holders.append(Holder(int(folder.name), fields["Name"].strip(), size))
    return holders


def processor_flags() -> set[str]:
    """The instruction sets in use."""
    text = CPUINFO.read_text() if CPUINFO.is_file() else ""
    lines = "".join(re.findall(r"^(?:flags|Features)\s*:.*$", text, re.MULTILINE))
    flags = set(re.findall(r"[a-z0-9_]+", lines))
    products, vectors = processor_limits()
    if products in WITHOUT_TILES or vectors in ("default", "avx2"):
        flags = {flag for flag in flags if not flag.startswith("amx_")}
    if products in NARROW or vectors in ("default", "avx2"):
        flags -= BFLOAT16
    return flags


def cpu_name() -> str:
    """The processor's model."""
    text = CPUINFO.read_text() if CPUINFO.is_file() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else "CPU"


def has_bfloat16() -> bool:
    """Whether bfloat16 is multiplied in hardware."""
    return bool(processor_flags() & BFLOAT16)


def has_tiles() -> bool:
    """Whether bfloat16 is multiplied in tiles."""
    return "amx_bf16" in processor_flags()


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return libc if getattr(libc, "gnu_get_libc_version", None) is not None else None


def _status(field: str) -> int | None:
    """Bytes in a field of /proc/self/status, if it is there."""
    lines = STATUS.read_text().splitlines() if STATUS.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)


def _number(file: Path) -> int | None:
    """The number in a file, None for "max"."""
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdigit() else None


def _idle(file: Path, name: str) -> int:
    """Bytes of files that a group has read and keeps in memory as long as there is room."""
    match = re.search(rf"^{name} (\d+)$", file.read_text(), re.MULTILINE) if file.is_file() else None
    return int(match[1]) if match else 0
