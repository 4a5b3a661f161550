"""The device that trains, and how much of its memory was needed at most."""

import ctypes
import resource
import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor

STATUS = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # of glibc's mallopt
LARGE = 32 * 2**20  # bytes: glibc's own limit of what it may keep, where its program does not choose


def pick_device() -> torch.device:
    """The current GPU if there is one, else the CPU."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def take_device(device: torch.device | str) -> torch.device:
    """The one that this process works on from here: Triton's kernels and streams go to the current GPU."""
    device = torch.device(device)
    if device.type == "cuda" and str(device) != "cuda" and torch.cuda.is_available():
        torch.cuda.set_device(device)
    return resolved(device)  # says what is wrong with one that is not there


def resolved(device: torch.device) -> torch.device:
    """As its tensors name it: `cuda` with the number of the current GPU. They do not compare as equal."""
    return torch.empty(0, device=device).device


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device, behind what that computes. From memory that is not pinned CUDA would wait for it all."""
    if device.type == "cuda":
        tensor = pinned_like(tensor).copy_(tensor)
    return tensor.to(device, non_blocking=True)


def pinned_like(pattern: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Memory on the host from which a GPU copies by itself, if the system lets it be: else it is as right,
    and slower.
    """
    try:
        return torch.empty_like(pattern, dtype=dtype, device="cpu", pin_memory=True)
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        warnings.warn(f"host memory cannot be pinned, copies are slower: {said}", stacklevel=2)
        return torch.empty_like(pattern, dtype=dtype, device="cpu")


def cap_memory(device: torch.device, most: int) -> None:
    """Of a GPU, tensors of this process take no more than so many bytes: the rest is for others."""
    if device.type == "cuda":
        _, whole = torch.cuda.mem_get_info(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(0, most) / whole), device)


def keep_freed_memory() -> None:
    """Memory that a step gives back is there for the next one. As shipped glibc returns it to the system,
    which clears thousands of pages a step anew: a tenth of a small model's time. The peak is the same.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if getattr(libc, "gnu_get_libc_version", None) is not None:
            libc.mallopt(MMAP_THRESHOLD, LARGE)
            libc.mallopt(TRIM_THRESHOLD, -1)
            libc.mallopt(ARENA_MAX, 1)  # what one thread frees (gloo's, the saver's) is there for all


def give_back_memory() -> None:
    """What was freed up to here goes back to the system: no step needs what loading and factoring took."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if getattr(libc, "gnu_get_libc_version", None) is not None:
            libc.malloc_trim(0)


def memory_in_use(device: torch.device) -> int:
    """The most bytes in use since `reset_peak`: tensors on a GPU, the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if STATUS.is_file():
        lines = STATUS.read_text().splitlines()
        peak = next((line for line in lines if line.startswith("VmHWM:")), None)
        if peak is not None:
            return int(peak.split()[1]) * 1024
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def resident() -> int:
    """Bytes of this process that are in memory now, freed ones that its heap keeps among them; 0: unknown."""
    if not STATUS.is_file():
        return 0
    lines = STATUS.read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0)


def reset_peak(device: torch.device) -> bool:
    """Start measuring anew. False where the system cannot: the peak then counts from the process's start."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    if not RESET.exists():
        return False
    try:
        RESET.write_text("5")  # Linux: sets the high-water mark to what is resident now
    except OSError:  # some containers forbid it; the caller learns it from the answer
        return False
    return True
