"""`doctor [CONFIG]`: what this machine has, what is wrong or missing, and the command that mends it.

With a config it also runs the proofs that stand at each start of training.
"""

import argparse
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Literal

from glm_accelerate.cli import source
from glm_accelerate.runtime.env import compiler, visible_devices

if TYPE_CHECKING:
    from rich.console import Console

    from glm_accelerate.plan.hardware import Hardware

HELP = "Look at this machine: versions, devices, memory, what is missing and the command that mends it."

OPTIONAL = {"tensorboard": "sink `tensorboard`", "swanlab": "sink `swanlab`"}
# The oldest NVIDIA driver for programs of a CUDA release, by its first number.
OLDEST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
LITTLE_MEMORY = 0.9  # less than this share free: somebody else is on the device
PATIENCE = 30.0  # seconds for nvidia-smi to answer
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: how it stands, what it is, what was found, and the command that mends it."""

    state: Literal["good", "note", "bad"]
    name: str
    found: str
    cure: str = ""


def arguments(parser: argparse.ArgumentParser) -> None:
    """CONFIG may be left out."""
    source.arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the findings, then the proofs; 2 if anything has to be mended."""
    config = source.config_from(args) if source.is_given(args) else None  # its mistakes come first

    from rich.console import Console

    from glm_accelerate.plan.hardware import detect

    console = Console()
    findings = list(examine(detect(), _holders()))
    _show(findings, console)
    if config is not None:
        from glm_accelerate.prove.start import prove_start

        proofs = prove_start(config)
        proven = [Finding("good" if proof.ok else "bad", proof.name, proof.said) for proof in proofs]
        _show(proven, console)
        findings += proven
    return 2 if any(finding.state == "bad" for finding in findings) else 0


def examine(hardware: "Hardware", holders: list[str]) -> Iterator[Finding]:
    """Everything but the proofs, from facts alone."""
    yield Finding("good", "python", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    for package in ("glm-accelerate", "torch", "transformers", "tokenizers", "safetensors"):
        yield Finding("good", package, version(package))
    yield driver(hardware)
    yield Finding("good", "device", f"{hardware.count} x {hardware.name}, {hardware.cores} cores")
    yield memory(hardware, holders)
    if hardware.bf16:
        yield Finding("good", "bfloat16", "in hardware")
    else:
        cure = "precision.compute=float32" if hardware.device == "cpu" else "a GPU from Ampere on has it"
        yield Finding("note", "bfloat16", "emulated: correct, but slow", cure)
    yield cpp()
    for package, purpose in OPTIONAL.items():
        if not _installed(package):
            cure = f'pip install "glm-accelerate[{package}]"'
            yield Finding("note", package, f"not installed, needed for the {purpose} only", cure)


def driver(hardware: "Hardware") -> Finding:
    """NVIDIA's driver against the CUDA that torch was built with."""
    has, built = hardware.driver_version, hardware.cuda_version
    if built is None and has is None:
        return Finding("good", "CUDA", "no NVIDIA driver here; torch is a CPU build")
    if built is None:
        cure = "install the CUDA build of torch that pytorch.org names for this driver"
        return Finding("bad", "CUDA", f"driver {has} is loaded, but torch is a CPU build", cure)
    if has is None and hardware.device == "cpu":
        return Finding("note", "CUDA", f"torch is built for CUDA {built}, but no driver is loaded: CPU only")
    oldest = OLDEST_DRIVER.get(int(built.split(".")[0]))
    if has is not None and oldest is not None and tuple(map(int, has.split(".")[:2])) < oldest:
        cure = f"update the driver to {oldest[0]}.{oldest[1]} or later, or install torch for an older CUDA"
        return Finding(
            "bad", "CUDA", f"driver {has} is too old for CUDA {built}, which torch is built for", cure
        )
    if hardware.device == "cpu":
        hidden = visible_devices()
        cure = f"CUDA_VISIBLE_DEVICES is `{hidden}`" if hidden is not None else "look at nvidia-smi"
        return Finding("bad", "CUDA", f"driver {has} and CUDA {built} fit, but torch sees no GPU", cure)
    return Finding("good", "CUDA", f"driver {has or 'unknown'}, torch built for CUDA {built}")


def memory(hardware: "Hardware", holders: list[str]) -> Finding:
    """What is free on the device, and who holds the rest."""
    found = f"{hardware.free_bytes / GIB:.1f} of {hardware.memory_bytes / GIB:.1f} GiB free"
    if hardware.device == "cpu":
        return Finding("good", "memory", found)
    held = f"; held by {', '.join(holders)}" if holders else ""
    if hardware.free_bytes < LITTLE_MEMORY * hardware.memory_bytes:
        return Finding("note", "memory", found + held, "end them, or choose a device: CUDA_VISIBLE_DEVICES=N")
    return Finding("good", "memory", found + held)


def cpp() -> Finding:
    """torch.compile on a CPU needs a C++ compiler; nothing else does."""
    names = [name for name in (compiler(), "c++", "g++", "clang++") if name]
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        return Finding("note", "C++ compiler", "none: nothing is compiled", "apt-get install g++")
    return Finding("good", "C++ compiler", found)


def held_by(table: str) -> list[str]:
    """Rows of `pid, process_name, used_memory [MiB]` -> what a person reads."""
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines() if line.count(",") == 2]
    return [f"{name} (process {pid}, {used} MiB)" for pid, name, used in rows]


def _holders() -> list[str]:
    """Who else is on the GPUs, as nvidia-smi tells where there is one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = ["--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run([tool, *query], capture_output=True, text=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:  # as with a GPU that hangs, when a doctor is asked for most
        return ["unknown: nvidia-smi does not answer"]
    return held_by(answer.stdout) if answer.returncode == 0 else [f"unknown: {answer.stdout.strip()}"]


def _installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _show(findings: list[Finding], console: "Console") -> None:
    from rich.table import Table
    from rich.text import Text

    marks = {"good": ("ok", "green"), "note": ("note", "yellow"), "bad": ("mend", "bold red")}
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        mark, style = marks[finding.state]
        table.add_row(Text(mark, style), Text(finding.name), Text(finding.found), Text(finding.cure, "cyan"))
    console.print(table)
