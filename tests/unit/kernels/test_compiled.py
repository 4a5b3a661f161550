"""The compiled forms of the operators by the house rule, and that no other length compiles anything again."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from glm_accelerate.kernels import compiled, linear_cross_entropy, rms_norm, swiglu

pytestmark = [
    pytest.mark.process,  # a compiler's
    pytest.mark.skipif(bool(compiled.missing("cpu")), reason="there is no C++ compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own, while it compiles
]


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Numbers that bfloat16 holds, so that rounding them is nobody's error."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.bfloat16().double()


def outcome(function: Callable[..., Tensor], inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """What a function returns in a dtype, and every gradient of a fixed weighting of it."""
    leaves = [x.to(dtype).requires_grad_(True) for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, normal(*out.shape, seed=9).to(out.dtype))]


def judge(mine: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    """err(mine) <= 2 err(plain) + 1 ulp of the largest value, in bfloat16."""
    exact = outcome(plain, inputs, torch.float64)
    found, others = outcome(mine, inputs, torch.bfloat16), outcome(plain, inputs, torch.bfloat16)
    for value, other, truth in zip(found, others, exact, strict=True):
        ulp = torch.finfo(value.dtype).eps * truth.abs().max().item()
        error = (value.double() - truth).abs().max().item()
        assert error <= 2 * (other.double() - truth).abs().max().item() + ulp


def count(function: Callable[[int], None], lengths: tuple[int, ...]) -> int:
    """How many compilations come after the first length."""
    function(lengths[0])
    before = compiled.compilations()
    for length in lengths[1:]:
        function(length)
    return compiled.compilations() - before


def test_norms() -> None:
    def plain(x: Tensor, branch: Tensor, after: Tensor, before: Tensor) -> Tensor:
        y = x + rms_norm.rms_norm_reference(branch, after, 1e-5)
        return torch.cat((y, rms_norm.rms_norm_reference(y, before, 1e-5)), -1)

    def mine(x: Tensor, branch: Tensor, after: Tensor, before: Tensor) -> Tensor:
        return torch.cat(rms_norm.sandwich(x, branch, after, before, 1e-5, "compiled"), -1)

    def one(rows: int) -> None:
        weights = [normal(60, seed=2), normal(60, seed=3)]
        judge(mine, plain, [normal(1, rows, 60), normal(1, rows, 60, seed=1), *weights])
        judge(
            lambda x, w: rms_norm.rms_norm(x, w, 1e-5, "compiled"),
            lambda x, w: rms_norm.rms_norm_reference(x, w, 1e-5),
            [normal(1, rows, 60), normal(60, seed=1)],
        )
        judge(
            lambda x, branch, w: rms_norm.add_norm(x, branch, w, 1e-5, "compiled"),
            lambda x, branch, w: x + rms_norm.rms_norm_reference(branch, w, 1e-5),
            [normal(1, rows, 60), normal(1, rows, 60, seed=4), normal(60, seed=1)],
        )

    assert count(one, (33, 7, 200)) == 0


def test_swiglu() -> None:
    def one(rows: int) -> None:
        judge(lambda x: swiglu.swiglu(x, "compiled"), swiglu.swiglu_reference, [normal(1, rows, 122) * 2])

    assert count(one, (33, 7, 200)) == 0


def test_cross_entropy() -> None:
    def one(rows: int) -> None:
        labels = torch.arange(rows) % 131
        judge(
            lambda x, w: linear_cross_entropy.linear_cross_entropy(x, w, labels, form="compiled"),
            lambda x, w: linear_cross_entropy.linear_cross_entropy_reference(x, w, labels),
            [normal(rows, 60), normal(131, 60, seed=1)],
        )

    assert count(one, (33, 7, 200)) == 0
    one(1)  # a single row stays eager


@pytest.mark.process
def test_compiled_code_is_kept_by_processor_and_settings(tmp_path: Path) -> None:
    """In processes of their own, because torch reads where it keeps it once."""
    script = """
import sys, torch
from glm_accelerate.kernels.compiled import keep_by_machine
from torch._inductor.runtime.cache_dir_utils import cache_dir
if "asked" in sys.argv:
    cache_dir()
keep_by_machine()
print(cache_dir())
"""

    def folder(*words: str, **settings: str) -> Path:
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("TORCHINDUCTOR_CACHE_DIR", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
        }
        environment |= {"GLM_ACCELERATE_CACHE": str(tmp_path / "cache"), **settings}
        done = subprocess.run(
            [sys.executable, "-c", script, *words],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return Path(done.stdout.strip())

    plain = folder()
    assert plain.parent == tmp_path / "cache" / "inductor"
    assert plain == folder("asked")  # by another part of torch before
    assert len({plain, folder(ATEN_CPU_CAPABILITY="avx2"), folder(ONEDNN_MAX_CPU_ISA="AVX2")}) == 3
    assert folder(TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "own")) == tmp_path / "own"
