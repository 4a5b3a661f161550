"""`doctor [CONFIG]`: what this machine has, what is wrong or missing, and the command that mends it.

With a config it also runs the proofs that stand at each start of training. `--save` and `--compare` are in
machine.py.
"""

import argparse
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from glm_accelerate.cli import machine, options
from glm_accelerate.runtime.env import named_interfaces, visible_devices
from glm_accelerate.runtime.errors import ExitCode, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from glm_accelerate.plan.hardware import Hardware

HELP = "Look at this machine: versions, devices, memory, what is missing and the command that mends it."

NEEDED = ("torch", "transformers", "tokenizers", "safetensors")
EXTRAS = {  # by name, what each is for
    "tensorboard": "the sink `tensorboard`",
    "swanlab": "the sink `swanlab`",
    "zstd": "checkpoint.codec=zstd, and .zst data",
    "parquet": "Parquet and Arrow data",
    "qlora": "adapt.base=nf4, to be fast",
    "metrics": "scores of Chinese text",
    "torchao": "optim.name=adamw8bit",
}
EXTRA = re.compile(r"([\w-]+)>=([\d.]+); extra == \W(\w+)\W")  # as the package's own metadata has it
# The versions of constraints.txt, with which all tests run.
TESTED = {
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "tokenizers": "0.23.3",
    "safetensors": "0.8.0",
    "tensorboard": "2.21.0",
    "bitsandbytes": "0.50.2",
    "torchao": "0.18.0",
    "jieba": "0.42.1",
    "pyarrow": "26.0.1",
}
# CUDA releases of torch's builds, and the capabilities that each has code for, from and below: as 2.13 says.
BUILDS = {"13.0": ((7, 5), (13, 0)), "12.6": ((5, 0), (10, 0))}
# The oldest NVIDIA driver for programs of a CUDA release, by its first number.
OLDEST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
LITTLE_MEMORY = 0.9  # less than this share free: somebody else is on the device
PATIENCE = 30.0  # seconds for nvidia-smi to answer
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: whether it is good, what it is about, the facts, and the command that mends it."""

    state: Literal["good", "note", "bad"]
    name: str
    text: str
    cure: str = ""


def arguments(parser: argparse.ArgumentParser) -> None:
    options.config_arguments(parser)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write what this machine is as JSON, too")
    parser.add_argument(
        "--compare",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="only what differs between such a file and this machine, or between two files, and what of it "
        "changes results; exit code 4 if anything does differ",
    )


def run(args: argparse.Namespace) -> int:
    """Print the findings, then the proofs of a config; 2 if anything has to be mended."""
    if args.compare:
        return _compare(args)
    config = options.config_from(args) if options.has_config(args) else None  # its mistakes come first

    from rich.console import Console

    from glm_accelerate.plan.hardware import detect
    from glm_accelerate.runtime.device import device_kind

    console = Console()
    hardware = detect()
    findings = list(examine(hardware, _holders()))
    if device_kind(hardware.device).gpu_kernels:
        findings += _cards()
    _show(findings, console)
    if config is not None:
        from glm_accelerate.assemble.prove import prove_config

        proofs = prove_config(config)
        proven = [Finding("good" if proof.ok else "bad", proof.name, proof.said) for proof in proofs]
        _show(proven, console)
        findings += proven
    if args.save:
        from glm_accelerate.runtime.screen import say

        machine.save(args.save, machine.facts(hardware))
        say(console, f"saved: {args.save}")
    return ExitCode.USERS_INPUT if any(finding.state == "bad" for finding in findings) else ExitCode.DONE


def _compare(args: argparse.Namespace) -> int:
    """This machine beside a file, or two files beside each other."""
    if args.save or options.has_config(args):
        raise UserError("--compare stands alone", cure="doctor --compare FILE [FILE2]")
    if len(args.compare) > 2:
        raise UserError(f"--compare has {len(args.compare)} files, expected one or two")
    first, *second = args.compare
    ours = machine.read(first)

    from glm_accelerate.runtime.screen import new_console

    if second:
        titles, theirs = (first.name, second[0].name), machine.read(second[0])
    else:
        from glm_accelerate.plan.hardware import detect

        titles, theirs = (first.name, "this machine"), machine.facts(detect())
    return ExitCode.DONE if machine.compare(ours, theirs, titles, new_console()) else ExitCode.DIFFERENT


def examine(hardware: "Hardware", holders: list[str]) -> Iterator[Finding]:
    """All findings about the machine that follow from these facts."""
    yield Finding("good", "python", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    yield Finding("good", "glm-accelerate", version("glm-accelerate"))
    for package in NEEDED:
        yield Finding("good", package, f"{version(package)}{_tested(package)}")
    yield driver(hardware)
    yield Finding("good", "device", f"{hardware.count} x {hardware.name}, {hardware.cores} cores")
    yield memory(hardware, holders)
    if hardware.bf16:
        yield Finding("good", "bfloat16", "in hardware")
    elif hardware.device == "cpu":
        yield Finding("note", "bfloat16", "emulated: correct, but slow", "precision.compute=float32")
    else:
        text = "not in hardware: float16 takes its place"
        yield Finding("note", "bfloat16", text, "a GPU from Ampere on has it")
    yield cpp()
    yield listeners(named_interfaces())
    for requirement in requires("glm-accelerate") or ():
        if (named := EXTRA.fullmatch(requirement)) and named[3] in EXTRAS:
            yield extra(named[3], named[1], named[2])


def extra(name: str, package: str, oldest: str) -> Finding:
    """The finding about a package that only one feature needs."""
    purpose, cure = EXTRAS[name], f'pip install --upgrade "glm-accelerate[{name}]"'
    try:
        has = version(package)
    except PackageNotFoundError:
        return Finding("note", package, f"not installed, needed for {purpose} only", cure)
    if _numbers(has) < _numbers(oldest):
        return Finding("note", package, f"{has}, and {purpose} needs {oldest}", cure)
    return Finding("good", package, f"{has}{_tested(package)}, for {purpose}")


def code(name: str, capability: tuple[int, int], arches: Sequence[str]) -> Finding:
    """Whether torch was built for a GPU. `arches`: sm_80 runs on 8.0 and later 8.x, sm_90a on 9.0 alone, and
    compute_90 is compiled when it is loaded, for anything from 9.0 on.
    """
    card, dotted = capability[0] * 10 + capability[1], f"{capability[0]}.{capability[1]}"
    for kind, number, alone in re.findall(r"(sm|compute)_(\d+)(a?)", " ".join(arches)):
        if card == int(number) or (
            not alone and card > int(number) and (kind == "compute" or card // 10 == int(number) // 10)
        ):
            return Finding("good", "GPU", f"{name}, capability {dotted}, torch has code for it")
    fitting = [f"CUDA {release}" for release, (least, end) in BUILDS.items() if least <= capability < end]
    which = f"for {' or '.join(fitting)}" if fitting else "of another release, if there is one,"
    cure = f"install the build of torch {which} that pytorch.org names"
    return Finding("bad", "GPU", f"{name} has capability {dotted}, this torch has {' '.join(arches)}", cure)


def driver(hardware: "Hardware") -> Finding:
    """NVIDIA's driver against the CUDA that torch was built with."""
    has, built = hardware.driver, hardware.toolkit
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
        text = f"driver {has} is too old for CUDA {built}, which torch is built for"
        return Finding("bad", "CUDA", text, cure)
    if hardware.device == "cpu":
        hidden = visible_devices()
        cure = f"CUDA_VISIBLE_DEVICES is `{hidden}`" if hidden is not None else "look at nvidia-smi"
        return Finding("bad", "CUDA", f"driver {has} and CUDA {built} fit, but torch sees no GPU", cure)
    return Finding("good", "CUDA", f"driver {has or 'unknown'}, torch built for CUDA {built}")


def memory(hardware: "Hardware", holders: list[str]) -> Finding:
    """What is free on the device, and who holds the rest."""
    text = f"{hardware.free_bytes / GIB:.1f} of {hardware.memory_bytes / GIB:.1f} GiB free"
    if hardware.device == "cpu":
        return Finding("good", "memory", text)
    held = f"; held by {', '.join(holders)}" if holders else ""
    if hardware.free_bytes < LITTLE_MEMORY * hardware.memory_bytes:
        return Finding("note", "memory", text + held, "end them, or choose a device: CUDA_VISIBLE_DEVICES=N")
    return Finding("good", "memory", text + held)


def cpp() -> Finding:
    """torch.compile on a CPU needs a C++ compiler; nothing else does."""
    path = machine.find_compiler()
    if path is None:
        return Finding("note", "C++ compiler", "none: nothing is compiled", "apt-get install g++")
    return Finding("good", "C++ compiler", path)


def listeners(named: Mapping[str, str]) -> Finding:
    """What listens while ranks train, and for whom. `named`: interfaces that the user's variables name."""
    if not named:
        text = (
            "nothing beyond this machine (--nproc); across machines (--nnodes), launchers, ranks and gloo or "
        )
        return Finding(
            "good", "listens", f"{text}NCCL on the interface that reaches HOST, without a password"
        )
    where = ", ".join(f"{name}={value}" for name, value in named.items())
    cure = f"unset {' '.join(named)} to keep ranks of one machine to themselves"
    return Finding("note", "listens", f"ranks, without a password, as {where} says", cure)


def _holders() -> list[str]:
    """The processes on the GPUs by nvidia-smi, if it is installed."""
    from glm_accelerate.runtime.devices.nvidia import HOLDERS, NoAnswer, driver_table

    try:
        rows = driver_table(HOLDERS, PATIENCE)
    except NoAnswer as error:  # as with a GPU that hangs, when a doctor is needed most
        return [f"unknown: {error}"]
    return [f"{row[2]} (process {row[1]}, {row[3]} MiB)" for row in rows if len(row) == 4]


def _cards() -> Iterator[Finding]:
    """What torch and Triton can do with the GPUs that are here."""
    from glm_accelerate.kernels.triton_here import no_triton
    from glm_accelerate.runtime.devices.nvidia import cards

    yield from starmap(code, cards())
    lack = no_triton()
    if lack is None:
        yield Finding("good", "Triton", f"{version('triton')}, its kernels run here")
    else:
        yield Finding("note", "Triton", f"{lack[0]}: slower operators run", lack[1])


def _tested(package: str) -> str:
    return f" (tested with {TESTED[package]})" if package in TESTED else ""


def _numbers(written: str) -> list[int]:
    """The first numbers of a version, to be compared."""
    return [int(number) for number in re.findall(r"\d+", written)[:3]]


def _show(findings: list[Finding], console: "Console") -> None:
    """Cures are on lines of their own, which can be copied at any width."""
    from rich.text import Text

    from glm_accelerate.runtime.screen import say

    marks = {"good": ("ok", "green"), "note": ("note", "yellow"), "bad": ("mend", "bold red")}
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        mark, style = marks[finding.state]
        say(console, (f"{mark:4}", style), f" {finding.name:{width}} {finding.text}")
        if finding.cure:
            console.print(Text(f"{'':{width + 6}}{finding.cure}", "cyan"), soft_wrap=True)
