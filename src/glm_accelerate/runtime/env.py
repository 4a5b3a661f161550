"""Environment variables, and the share of the machine that we may use.

Nothing else reads `os.environ`, so everything that can silently change a run is in this file.
"""

import math
import os
import platform
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from glm_accelerate.runtime.errors import UserError

# Where control groups are, and which of them are this process's. Without a namespace of its own a process
# sees its group below the root; a container sees it as the root.
GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")

ALONE = "unset RANK to train in one process"


@dataclass(frozen=True, slots=True)
class Launched:
    """The place that a launcher (ours, torchrun, or one with the same variables) gave this process."""

    rank: int
    count: int
    local: int  # among the processes of this machine
    here: int  # how many these are, as far as the launcher says
    address: str  # where all of them meet ...
    port: int
    meeting: str | None  # ... or the file in which they do, if our own launcher started them on one machine
    listener: int | None  # the socket of the first one, if our own launcher has opened it
    restart: int  # how often the launcher has started it again
    job: str  # the launcher's name for all its attempts together
    agent_store: bool  # whether the launcher serves the meeting point itself


def launched() -> Launched | None:
    """Our place in a job of several processes, or None if no launcher started us."""
    meeting = os.environ.get("GLM_ACCELERATE_MEETING")
    if meeting is None and not ("RANK" in os.environ and {"WORLD_SIZE", "MASTER_ADDR"} & os.environ.keys()):
        return None
    count = _number("WORLD_SIZE", 1)
    rank = _number("RANK", 0, count)
    if meeting is None and not os.environ.get("MASTER_ADDR"):
        raise UserError("MASTER_ADDR is not set, but RANK is", cure=ALONE)
    own, listener = signs_folder() is not None, os.environ.get("GLM_ACCELERATE_LISTENER")
    return Launched(
        rank=rank,
        count=count,
        local=_number("LOCAL_RANK", 0) if "LOCAL_RANK" in os.environ else 0,
        here=_number("LOCAL_WORLD_SIZE", 1) if "LOCAL_WORLD_SIZE" in os.environ else 1,
        address="" if meeting is not None else os.environ["MASTER_ADDR"],
        port=0 if meeting is not None else _number("MASTER_PORT", 1, 1 << 16),
        meeting=meeting,
        listener=int(listener) if listener else None,
        restart=0 if own else int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        job=os.environ.get("GLM_ACCELERATE_JOB" if own else "TORCHELASTIC_RUN_ID", ""),
        agent_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def take_place(rank: int, count: int, local: int, here: int) -> None:
    """Take a place among the processes that our launcher has started: of `count`, `here` on this machine."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(here)}


def meet_in(file: str) -> None:
    """Have this process meet the others in a file."""
    os.environ["GLM_ACCELERATE_MEETING"] = file


def meet_at(address: str, port: int, listener: int | None) -> None:
    """Have this process meet the others at an address, where it listens itself if it has the socket."""
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    if listener is not None:
        os.environ["GLM_ACCELERATE_LISTENER"] = str(listener)


def given_rendezvous() -> str | None:
    """HOST:PORT as a scheduler gives them: for a launcher a node (Kubeflow), or for ranks."""
    for prefix in ("PET_", ""):
        host, port = (os.environ.get(f"{prefix}MASTER_{name}") for name in ("ADDR", "PORT"))
        if host and port:
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return None


def name_job(name: str) -> None:
    """Say to the processes that we start what all attempts of their job together are called."""
    os.environ["GLM_ACCELERATE_JOB"] = name


def node_name() -> str:
    """What this machine is called among those of a job: GLM_ACCELERATE_NODE, else its host's name."""
    return os.environ.get("GLM_ACCELERATE_NODE") or platform.node() or "unknown"


def listen_on(interface: str | None) -> None:
    """Have gloo and NCCL of our ranks listen on one interface only, unless the user has named another."""
    for library in ("GLOO", "NCCL"):
        if interface is not None:
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)


def named_interfaces() -> dict[str, str]:
    """The interfaces that a user has named for ranks, by variable."""
    names = [f"{library}_SOCKET_IFNAME" for library in ("GLOO", "NCCL")]
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def expanded(path: str | Path) -> Path:
    """The path with ~ or ~USER replaced by the home directory."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError("there is no such home directory", where=path, cure="write its path out") from error


def cache_root() -> Path:
    """Where tokenized data is kept: GLM_ACCELERATE_CACHE, else in the user's cache directory."""
    return _cache_at(os.environ.get("GLM_ACCELERATE_CACHE"))


def private_roots() -> list[Path]:
    """Where this user may have a folder that is nobody else's, the best place first."""
    roots: list[Path] = []
    for own in (os.environ.get("GLM_ACCELERATE_CACHE"), None):
        with suppress(UserError):
            roots.append(_cache_at(own))
    return [*dict.fromkeys(roots), Path(tempfile.gettempdir()) / f"glm-accelerate-{os.geteuid()}"]


def _cache_at(own: str | None) -> Path:
    shared = os.environ.get("XDG_CACHE_HOME")
    try:
        if own:
            return Path(own).expanduser()
        return (Path(shared) if shared else Path.home() / ".cache") / "glm-accelerate"
    except RuntimeError as error:  # no HOME, and a user whom the system does not know, as in a container
        cure = "set GLM_ACCELERATE_CACHE to a directory, or HOME"
        raise UserError("this user has no home directory to keep a cache in", cure=cure) from error


def use_utf8() -> None:
    """Start this process again in UTF-8 where its locale has only ASCII, which cannot name most files."""
    if sys.getfilesystemencoding() == "ascii":
        words = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
        os.execve(sys.executable, words, {**os.environ, "PYTHONUTF8": "1"})


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
    return max(1, min(_quota(group / "cpu.max", allowed) for group in control_groups("cpu")))


def control_groups(controller: str, mount: Path = GROUPS, own: Path = OWN_GROUPS) -> list[Path]:
    """Every directory that may limit this process: its own group's and those around it, up to the root.
    In version 1 of control groups each controller has a tree of its own.
    """
    groups: list[Path] = []
    for line in own.read_text().splitlines() if own.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = mount / controller if controllers else mount
        group = root / path.lstrip("/")
        while group != root:
            groups.append(group)
            group = group.parent
    return [*groups, mount, mount / controller]


def last_cores(count: int) -> list[int] | None:
    """The numbers of the last `count` cores; None where a process cannot choose its cores."""
    return sorted(os.sched_getaffinity(0))[-count:] if sys.platform == "linux" else None


def visible_devices() -> str | None:
    """CUDA_VISIBLE_DEVICES, if it is set: empty hides every GPU."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def share_cores(processes: int = 1) -> None:
    """Let waiting threads give their core back soon, unless GOMP_SPINCOUNT is set. Before torch loads.

    By default they spin for milliseconds, which beside another program costs most of the speed. Of several
    processes each takes its share of the cores.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    if processes > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // processes)))


def granted_threads() -> int | None:
    """The number of threads in OMP_NUM_THREADS, if it is set."""
    granted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(granted) if granted.isdecimal() and int(granted) > 0 else None


def one_range() -> None:
    """Let CUDA's allocator grow one range of addresses, unless its settings are given. Before torch loads.

    By default it takes segments, and free memory in several is of no use to a tensor that fits into none.
    """
    if not any(f"PYTORCH_{name}ALLOC_CONF" in os.environ for name in ("", "CUDA_", "HIP_")):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def repeat_products() -> bool:
    """Have cuBLAS sum in one order, before its first product. False if CUBLAS_WORKSPACE_CONFIG forbids it."""
    return os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8") in (":4096:8", ":16:8")


def few_kernels() -> None:
    """Let oneDNN keep few kernels, and PyTorch's own cache in front of it almost none, unless their variables
    are set. Before torch loads.

    Each shape of a product has one, of half a megabyte that lies between a pass's tensors. By default each
    keeps 1,024: memory climbed for hundreds of steps. A pass, whose layers are alike, has about twenty.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "4")


def quiet_profiler() -> None:
    """torch's profiler tells of its stages on stderr unless KINETO_LOG_LEVEL says otherwise. Before its first
    use.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def quiet_store() -> None:
    """torch warns at length, with addresses of its code, when the store of ranks is gone with the first one,
    unless TORCH_CPP_LOG_LEVEL is set. Before torch loads.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def share_signs(folder: Path) -> None:
    """Set where the ranks that we start leave their signs of life."""
    os.environ["GLM_ACCELERATE_SIGNS"] = str(folder)


def signs_folder() -> Path | None:
    """Where to leave signs of life, if a launcher watches."""
    value = os.environ.get("GLM_ACCELERATE_SIGNS")
    return Path(value) if value else None


def c_compiler() -> str | None:
    """The C compiler that CC names, if it is set."""
    return os.environ.get("CC") or None


def compiler() -> str | None:
    """The C++ compiler that CXX names, if it is set."""
    return os.environ.get("CXX") or None


def processor_limits() -> tuple[str, str]:
    """The processors to which oneDNN (ONEDNN_MAX_CPU_ISA) and PyTorch (ATEN_CPU_CAPABILITY) are limited."""
    products = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "ALL"
    return products.upper(), os.environ.get("ATEN_CPU_CAPABILITY", "").lower()


def keep_compiled(folder: Path) -> None:
    """Set where torch.compile keeps its code, before its first use, unless TORCHINDUCTOR_CACHE_DIR is set by
    the user: torch itself sets it as soon as one of its modules asks.
    """
    own = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if own is None or Path(own).name.startswith("torchinductor_"):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def variable(name: str) -> str:
    """What a variable that a config names holds; nothing if it is not set."""
    return os.environ.get(name, "")


def _quota(file: Path, otherwise: int) -> int:
    """Cores by a `cpu.max` file ("200000 100000": two; "max 100000": no limit)."""
    if not file.is_file():
        return otherwise
    quota, period = file.read_text().split()
    return otherwise if quota == "max" else min(otherwise, int(quota) // int(period))


def _number(name: str, least: int, end: float = math.inf) -> int:
    """A variable that a launcher has set: a whole number from `least` on, below `end`."""
    value = os.environ.get(name)
    if value is None:
        raise UserError(f"{name} is not set, but RANK is", cure=ALONE)
    if not (value.isascii() and value.isdecimal() and least <= int(value) < end):
        wanted = f"{least} or more" if end == math.inf else f"{least} to {end - 1}"
        raise UserError(f"{name} is {value!r}, expected {wanted}", cure=ALONE)
    return int(value)
