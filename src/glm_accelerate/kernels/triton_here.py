"""Whether Triton's kernels run on the current GPU. It is tried: besides its package Triton needs a C
compiler, Python's headers (it builds a library at its first launch) and a GPU that it has code for.
"""

import shutil
import subprocess
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from glm_accelerate.runtime import env

OLDEST = (7, 0)  # Volta: what torch.compile asks of a GPU for Triton


@cache
def no_triton() -> tuple[str, str] | None:
    """Why its kernels cannot run, and the cure if there is one; None if they can."""
    if find_spec("triton") is None:
        return "Triton is missing", "pip install triton"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < OLDEST:
        return "Triton has no code for a GPU older than Volta", ""
    from triton.errors import TritonError

    try:
        from glm_accelerate.kernels.triton_gelu import TritonGELU

        TritonGELU.apply(torch.zeros(1, device="cuda"), False, False).item()
    except (
        RuntimeError,
        AssertionError,
        OSError,
        ImportError,
        subprocess.SubprocessError,
        TritonError,
    ) as error:
        return lacking() or (f"Triton cannot run: {str(error).partition(chr(10))[0]}", "")
    return None


def lacking() -> tuple[str, str] | None:
    """The first tool that Triton builds with and that is missing, and the cure."""
    named = env.c_compiler()
    if not any(shutil.which(name) for name in ([named] if named else ["gcc", "clang"])):
        return f"Triton needs a C compiler ({named or 'gcc'})", "apt-get install gcc"
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return "Triton needs Python's headers (Python.h)", "apt-get install python3-dev"
    return None
