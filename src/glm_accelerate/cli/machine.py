"""A machine as facts that can be saved and compared: `doctor --save FILE`, `doctor --compare FILE [FILE2]`.

Of the environment only variables that are named here are kept: others may hold secrets.
"""

import json
import platform
import re
import resource
import shutil
import subprocess
from collections.abc import Mapping
from importlib.metadata import distributions, version
from pathlib import Path
from typing import TYPE_CHECKING

from glm_accelerate.runtime.env import compiler, variable
from glm_accelerate.runtime.errors import UserError
from glm_accelerate.runtime.words import amount

if TYPE_CHECKING:
    from rich.console import Console

    from glm_accelerate.plan.hardware import Hardware

MADE_BY = "glm-accelerate doctor"
ROOT, SHARED = Path(__file__).parents[3], Path("/dev/shm")
PACKAGES = re.compile(
    r"torch|transformers|tokenizers|safetensors|sentencepiece|numpy|triton|torchao|bitsandbytes|pyarrow"
    r"|nvidia-(cublas|cudnn|nccl).*"
)
VECTORS = re.compile(r"(avx|amx|fma|sve|asimd|bf16|f16c|sse4).*")
VARIABLES = (
    "ATEN_CPU_CAPABILITY", "CC", "CUBLAS_WORKSPACE_CONFIG", "CUDA_VISIBLE_DEVICES", "CXX", "DNNL_MAX_CPU_ISA",
    "GLOO_SOCKET_IFNAME", "HF_HUB_OFFLINE", "LD_PRELOAD", "MKL_CBWR", "MKL_NUM_THREADS", "NCCL_ALGO",
    "NCCL_PROTO", "NCCL_SOCKET_IFNAME", "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TRITON_INTERPRET",
)  # fmt: skip
SUMS, TEXT = (
    "other kernels, sums in another order",
    "other tokens, if templates or vocabularies are read anew",
)
# Of which facts a difference changes results, and by what. All others change speed, memory or nothing.
CHANGES = {
    r"torch|triton|torchao|bitsandbytes|nvidia-(cublas|cudnn).*|CUDA": SUMS,
    r"nvidia-nccl.*|\$NCCL_(ALGO|PROTO)": "gradients of ranks are summed in another order",
    r"transformers|tokenizers|sentencepiece": TEXT,
    r"glm-accelerate|commit": "another program",
    r"device|device \d+|bfloat16|vectors|instructions|processor|architecture": SUMS,
    r"threads|\$(OMP|MKL)_NUM_THREADS": "sums are divided among threads in another way",
    r"compiler": "kernels that are compiled here",
    r"\$(ATEN_CPU|CUBLAS|DNNL_MAX|MKL_CBWR|NVIDIA_TF32|ONEDNN_MAX|TORCH_ALLOW_TF32|TRITON_).*": SUMS,
}
PATIENCE = 10.0  # seconds for git or a compiler to answer


def facts(hardware: "Hardware") -> dict[str, str]:
    """What this machine is, by name. Nothing that changes while one looks, such as free memory."""
    import torch

    from glm_accelerate.runtime.device import device_kind
    from glm_accelerate.runtime.devices.nvidia import cards
    from glm_accelerate.runtime.host import cpu_name, processor_flags

    found = {
        "glm-accelerate": version("glm-accelerate"),
        "commit": commit(),
        "python": platform.python_version(),
    }
    found |= packages() | {"torch": torch.__version__}  # with the build, such as +cpu
    found |= {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "processor": cpu_name(),
        "instructions": " ".join(sorted(flag for flag in processor_flags() if VECTORS.fullmatch(flag))),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "cores": str(hardware.cores),
        "threads": str(torch.get_num_threads()),
        "device": hardware.kind,
        "devices": str(hardware.count),
        "bfloat16": "in hardware" if hardware.bf16 else "emulated",
        "device memory": amount(hardware.memory_bytes),
        "memory": amount(hardware.host_bytes),
        "CUDA": hardware.toolkit or "",
        "driver": hardware.driver or "",
        "compiler": compiled_by(),
    }
    if device_kind(hardware.device).gpu_kernels:
        for number, (name, capability, _) in enumerate(cards()):
            found[f"device {number}"] = f"{name}, capability {capability[0]}.{capability[1]}"
    found |= limits() | {f"${name}": variable(name) for name in VARIABLES}
    return {name: value for name, value in found.items() if value}


def packages() -> dict[str, str]:
    """Versions of what computes or reads."""
    named = ((found.metadata["Name"].lower(), found.version) for found in distributions())
    return dict(sorted((name, its) for name, its in named if PACKAGES.fullmatch(name)))


def limits() -> dict[str, str]:
    """What the system grants to a process, and to what its processes share."""
    asked = {"open files": resource.RLIMIT_NOFILE, "locked memory": resource.RLIMIT_MEMLOCK}
    soft = {name: resource.getrlimit(which)[0] for name, which in asked.items()}
    granted = {
        name: "no limit" if most == resource.RLIM_INFINITY else str(most) for name, most in soft.items()
    }
    return granted | ({str(SHARED): amount(shutil.disk_usage(SHARED).total)} if SHARED.is_dir() else {})


def commit() -> str:
    """Of the checkout that this program runs from; nothing if it was installed."""
    if not (ROOT / ".git").exists():
        return ""
    changed = _answer("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return _answer("git", "-C", str(ROOT), "rev-parse", "HEAD") + (", changed" if changed else "")


def find_compiler() -> str | None:
    """The C++ compiler that torch.compile and our own kernels are compiled with."""
    names = [name for name in (compiler(), "c++", "g++", "clang++") if name]
    return next((path for name in names if (path := shutil.which(name))), None)


def compiled_by() -> str:
    """The compiler's own first line."""
    path = find_compiler()
    return _answer(path, "--version").partition("\n")[0] if path else ""


def save(file: Path, found: Mapping[str, str]) -> None:
    from glm_accelerate.runtime.files import write_text

    content = {"made_by": MADE_BY, "facts": dict(found)}
    write_text(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read(file: Path) -> dict[str, str]:
    """The facts in a file that `save` wrote."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=file) from error
    except ValueError:
        content = None
    found = content.get("facts") if isinstance(content, dict) and content.get("made_by") == MADE_BY else None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        cure = "glm-accelerate doctor --save FILE, on the other machine"
        raise UserError("is no file of `doctor --save`", where=file, cure=cure)
    return found


def effect(name: str) -> str:
    """By what a difference in this fact changes results; nothing if it does not."""
    return next((what for names, what in CHANGES.items() if re.fullmatch(names, name)), "")


def compare(
    ours: Mapping[str, str], theirs: Mapping[str, str], titles: tuple[str, str], console: "Console"
) -> bool:
    """Show what differs, first what changes results. Whether nothing does."""
    from rich.text import Text

    from glm_accelerate.runtime.screen import new_table, say

    odd = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if not odd:
        say(console, f"alike in all of {len(ours)} facts")
        return True
    odd.sort(key=lambda name: not effect(name))  # else in the order of the facts
    table = new_table("", *titles, "results")
    for name in odd:
        here, there = _apart(name, ours.get(name, "none"), theirs.get(name, "none"))
        change = effect(name)
        table.add_row(Text(name), Text(here), Text(there), f"change: {change}" if change else "the same")
    console.print(table)
    changing = sum(1 for name in odd if effect(name))
    say(console, f"{changing} of {len(odd)} differences can change results")
    return False


def _apart(name: str, ours: str, theirs: str) -> tuple[str, str]:
    """Of two long lists only what the other one lacks."""
    if name != "instructions":
        return ours, theirs
    one, other = set(ours.split()), set(theirs.split())
    return " ".join(sorted(one - other)) or "no more", " ".join(sorted(other - one)) or "no more"


def _answer(*command: str) -> str:
    """What a program prints; nothing where it is missing or fails."""
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if told.returncode else told.stdout.strip()
