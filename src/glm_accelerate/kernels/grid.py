"""How Triton kernels lie over rows: sizes as plain functions of a width. Imports no Triton."""

import torch
from torch import Tensor

from glm_accelerate.runtime.device import device_of

WIDEST = 32_768  # numbers of a row that one program holds at once
STEP = 1024  # numbers of a program where rows can be cut: 8 a thread, 16 bytes of bfloat16
STEP_WARPS = 4


def block_of(width: int) -> int:
    """The power of two that holds a row."""
    assert 0 < width <= WIDEST, f"a row of {width:,} numbers is wider than {WIDEST:,}"
    return max(16, 1 << (width - 1).bit_length())


def warps_of(block: int) -> int:
    """16 numbers a thread, and no more than 512 threads: their registers hold several such rows."""
    return min(16, max(1, block // 512))


def rows_of(x: Tensor) -> Tensor:
    """x as rows whose numbers lie side by side. The rows themselves may lie apart."""
    rows = x.flatten(0, -2) if x.ndim > 1 else x[None]
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def rows_each(rows: int, device: torch.device) -> int:
    """Rows of a program that keeps sums over them: two to four programs for each processor of a GPU.

    A power of two, because Triton compiles a kernel for each of them.
    """
    record = device_of(device)
    many = record.properties().multi_processor_count if record.gpu_kernels else 1
    return 1 << (max(1, -(-rows // (4 * many))) - 1).bit_length()
