"""Compiles every Triton kernel for a GPU that need not be here, at the sizes of real models, and prints what
ptxas made of each as JSON: started by test_triton_compiles.py in a process whose Triton does not interpret.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from glm_accelerate.kernels import gelu, layer_norm, rms_norm, rope, softmax, swiglu, triton_dropout
from glm_accelerate.kernels.linear_cross_entropy import linear_cross_entropy

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Absent:
    """A driver of a GPU that is not here: enough of it to compile."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def stack_bytes(cubin: bytes) -> int:
    """What a thread keeps in memory because its registers are full."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    return max(int(number) for number in re.findall(r"STACK:(\d+)", done.stdout))


def compile_only(said: list[dict[str, Any]]) -> Callable[[JITFunction, Any], Any]:
    """What `kernel[grid]` becomes: it compiles for the arguments and does not launch."""

    def at(kernel: JITFunction, grid: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> None:
            made = kernel.run(*arguments, grid=grid, warmup=True, **options)
            name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"
            said.append({"kernel": name, "stack": stack_bytes(made.asm["cubin"])})

        return call

    return at


def numbers(*shape: int, trained: bool = True) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16, requires_grad=trained)


def norms(width: int, trained: bool) -> None:
    x, branch = numbers(8, width), numbers(8, width)
    one, two = (numbers(width, trained=trained) for _ in range(2))
    rms_norm.rms_norm(x, one, 1e-5, "triton").sum().backward()
    rms_norm.add_norm(x, branch, one, 1e-5, "triton").sum().backward()
    torch.cat(rms_norm.sum_norm(x, branch, one, 1e-5, "triton")).sum().backward()
    torch.cat(rms_norm.sandwich(x, branch, one, two, 1e-5, "triton")).sum().backward()


def others() -> None:
    table = rope.rope_table(torch.arange(8)[None], 64, 1e4)
    for halves in (False, True):
        rope.rope(numbers(1, 8, 32, 128), table, "triton", halves).sum().backward()
    swiglu.swiglu(numbers(8, 27_392), "triton").sum().backward()
    shapes: tuple[gelu.Shape, ...] = ("tanh", "none")
    for shape in shapes:
        gelu.gelu(numbers(8, 16_384), shape, "triton").sum().backward()
        gelu.geglu(numbers(8, 65_536), shape, "triton").sum().backward()
    x, weight, bias = numbers(8, 12_288), numbers(12_288), numbers(12_288)
    layer_norm.layer_norm(x, weight, bias, 1e-5, "triton").sum().backward()
    layer_norm.deep_norm(x, x, weight, bias, 1e-5, alpha=2.0, dropout=0.1, form="triton").sum().backward()
    seen = torch.ones(1, 8192, dtype=torch.bool)
    softmax.masked_softmax(numbers(1, 2, 4, 8192), 1.0, keys_BS=seen, form="triton").sum().backward()
    activations = numbers(8, 4096, trained=False)
    triton_dropout.dropped(activations, 1, 0.1)
    triton_dropout.dropped(activations, 1, 0.1, into=activations.clone())
    labels = torch.zeros(8, dtype=torch.int64)
    linear_cross_entropy(numbers(8, 64), numbers(151_552, 64), labels, form="triton").backward()


if __name__ == "__main__":
    lines: list[dict[str, Any]] = []
    driver.set_active(Absent(int(sys.argv[1])))  # pyright: ignore
    JITFunction.__getitem__ = compile_only(lines)  # pyright: ignore
    for width in (4096, 6144):
        norms(width, trained=True)
        norms(width, trained=False)
    others()
    print(json.dumps(lines))
