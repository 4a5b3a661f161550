"""Our CPU operators in C++, compiled once for this machine and kept in the user's cache.

They need a compiler and a processor that multiplies bfloat16 (AVX-512 BF16 or AMX); without either, PyTorch's
operators run.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from glm_accelerate.runtime import env
from glm_accelerate.runtime.files import is_ours, private_folder
from glm_accelerate.runtime.host import CPUINFO, processor_flags

UNIT = "library.cpp"  # includes the others
FLAGS = (
    *("-O3", "-march=native", "-mprefer-vector-width=512", "-fno-math-errno", "-fno-trapping-math"),
    *("-std=gnu++20", "-fPIC", "-shared", "-fopenmp", "-DAT_PARALLEL_OPENMP=1", "-Wno-psabi"),
)
KINDS = ("model", "flags", "cpu family", "stepping", "Features", "CPU ")  # the last two: ARM


def lacking() -> str | None:
    """What this machine lacks to build and run them, or None. Compiles nothing."""
    if not {"amx_bf16", "avx512_bf16"} & processor_flags():
        return "no bfloat16 products (AVX-512 BF16 or AMX) in this processor"
    name = env.compiler() or "g++"
    return None if shutil.which(name) else f"no C++ compiler ({name})"


@cache
def load() -> str | None:
    """Make the operators available as torch.ops.glm_accelerate. Returns why they are not, or None."""
    lack = lacking()
    if lack is not None:
        return lack
    here = Path(__file__).parent
    identity = hashlib.sha256("\n".join([torch.__version__, *FLAGS, *processor()]).encode())
    for source in sorted([*here.glob("*.cpp"), *here.glob("*.h")]):
        identity.update(source.read_bytes())
    try:
        library = private_folder("native") / f"{identity.hexdigest()[:32]}.so"
    except PermissionError as error:  # whoever can write there would have their code run
        return str(error.strerror)
    if not (library.is_file() and is_ours(library)):
        failed = _compile(here, library)
        if failed is not None:
            return failed
    try:
        torch.ops.load_library(str(library))
    except OSError as error:  # damaged, or on a disk from which nothing may be executed
        return (
            f"{library} cannot be loaded ({error.__cause__ or error}): remove it, or set GLM_ACCELERATE_CACHE"
        )
    return None if torch.ops.glm_accelerate.multiplies() else "this torch multiplies no packed bfloat16 here"


def processor() -> list[str]:
    """The lines of /proc/cpuinfo that identify the kind of processor, on which alone a library is used."""
    if not CPUINFO.is_file():
        return []
    lines = CPUINFO.read_text().split("\n\n")[0].splitlines()
    return [line for line in lines if line.startswith(KINDS)]


def _compile(here: Path, library: Path) -> str | None:
    """Returns why it failed, or None. The library is renamed when complete, so nobody loads half of it."""
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        output = Path(folder) / "library.so"
        include = (root / "include", root / "include" / "torch" / "csrc" / "api" / "include")
        words = [env.compiler() or "g++", *FLAGS, *(f"-I{path}" for path in include)]
        words += [str(here / UNIT), "-o", str(output), f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-200:])
            return f"{words[0]} failed: {reason}"
        output.chmod(0o700)
        os.replace(output, library)
    return None
