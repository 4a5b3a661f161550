"""Operators as one fused loop each, made by torch.compile once a process and shared by all layers.

Only operators between matrix products are compiled. Lengths are symbols and widths are numbers, so nothing is
compiled again for a longer or shorter step.
"""

import hashlib
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm_accelerate.kernels.native.build import processor
from glm_accelerate.kernels.triton_here import no_triton
from glm_accelerate.runtime import env
from glm_accelerate.runtime.files import private_folder


def keep_by_machine() -> None:
    """Give each kind of machine and settings its own folder of compiled code, before torch.compile is first
    used: in a shared one torch finds the code of another processor, and crashes.
    """
    facts = [torch.__version__, sys.version, platform.machine(), *processor(), *env.processor_limits()]
    key = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    try:
        env.keep_compiled(private_folder("inductor", key))
    except PermissionError:  # torch's own choice is a name in /tmp that anybody can take first
        env.keep_compiled(Path(tempfile.mkdtemp(prefix="glm-accelerate-")))


@cache
def _compiled(body: Callable[..., Any]) -> Callable[..., Any]:
    keep_by_machine()
    return torch.compile(body, fullgraph=True)


def run(body: Callable[..., Any], *arguments: Any, lengths: dict[int, tuple[int, ...]]) -> Any:
    """body(*arguments), fused. `lengths` names the dimensions that change, by the place of the argument."""
    values = [each.detach() if isinstance(each, Tensor) else each for each in arguments]
    from torch._dynamo import maybe_mark_dynamic  # here: it takes a second to import

    for place, dimensions in lengths.items():
        for dimension in dimensions:
            maybe_mark_dynamic(values[place], dimension)
    return _compiled(body)(*values)


def compilations() -> int:
    """How many bodies have been compiled in this process, compiled again included."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def missing(device: str) -> str | None:
    """What is missing to compile for `device`, or None."""
    if device == "cpu":
        name = env.compiler() or "g++"
        return None if shutil.which(name) else f"no C++ compiler ({name})"
    lack = no_triton()
    return lack[0] if lack else None
