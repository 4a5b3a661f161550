"""Which path an operator takes on a device, and why. Shown once at the start of a run."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Choice:
    """A path by name and the reason for it."""

    operator: str
    path: str
    why: str


def in_blocks(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether attention runs in our own blocks of products."""
    return device.type == "cpu" and dtype == torch.bfloat16


def turning_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """In which numbers positions are applied and keys cached, for activations of `dtype`."""
    return torch.float32 if device.type == "cpu" and dtype == torch.bfloat16 else dtype


def choices(device: torch.device, dtype: torch.dtype) -> list[Choice]:
    """Every operator's path for activations of `dtype` on `device`."""
    if in_blocks(device, dtype):
        attention = Choice("attention", "blocks of bfloat16 products", "faster than torch's on a CPU")
    else:
        name = str(dtype).removeprefix("torch.")
        attention = Choice("attention", f"torch's, per document, {name}", "no document sees another")
    return [
        attention,
        Choice("cross-entropy", "chunked, float32 sums", "the step's logits never exist at once"),
        Choice("norm, rotary, swiglu, LoRA", "PyTorch, own backward", "runs on every device, keeps little"),
    ]
