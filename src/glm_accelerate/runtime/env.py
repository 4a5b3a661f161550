"""What the surroundings say: environment variables and the share of the machine that we may use.

Nothing else reads `os.environ`, so everything that can silently change a run is on this page.
"""

import os
import sys
from pathlib import Path


def cache_root() -> Path:
    """Where tokenized data is kept: GLM_ACCELERATE_CACHE, else in the user's cache directory."""
    own = os.environ.get("GLM_ACCELERATE_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "glm-accelerate"


def offline() -> bool:
    """Whether nothing may be fetched (GLM_ACCELERATE_OFFLINE, or HF_HUB_OFFLINE as its library has it)."""
    return any(
        os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on")
        for name in ("GLM_ACCELERATE_OFFLINE", "HF_HUB_OFFLINE")
    )


def cores() -> int:
    """Cores that this process may run on: its affinity, and in a container the whole cores of its quota."""
    if sys.platform != "linux":
        return os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0))
    return max(1, min(allowed, _quota(Path("/sys/fs/cgroup/cpu.max"), allowed)))


def visible_devices() -> str | None:
    """CUDA_VISIBLE_DEVICES, if it is set: empty hides every GPU."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def share_cores() -> None:
    """Threads that wait give their core back soon, unless GOMP_SPINCOUNT says otherwise. Before torch loads.

    They spin for milliseconds as shipped, which beside another program costs most of the speed.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def compiler() -> str | None:
    """The C++ compiler that CXX names, if it is set."""
    return os.environ.get("CXX") or None


def _quota(file: Path, otherwise: int) -> int:
    """Cores by a `cpu.max` file ("200000 100000": two; "max 100000": no limit)."""
    if not file.is_file():
        return otherwise
    quota, period = file.read_text().split()
    return otherwise if quota == "max" else int(quota) // int(period)
