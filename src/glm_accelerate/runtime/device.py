"""The device that trains, and how much of its memory was needed at most."""

import resource
import sys
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")


def pick_device() -> torch.device:
    """The current GPU if there is one, else the CPU."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


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
