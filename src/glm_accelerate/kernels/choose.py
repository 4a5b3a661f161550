"""Which path an operator takes on a device, and why. Shown once at the start of a run."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Choice:
    """A path by name and the reason for it."""

    operator: str
    path: str
    why: str


def attention_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """In which numbers rotary positions and attention are computed for activations of `dtype`."""
    return torch.float32 if device.type == "cpu" and dtype == torch.bfloat16 else dtype


def choices(device: torch.device, dtype: torch.dtype) -> list[Choice]:
    """Every operator's path for activations of `dtype` on `device`."""
    inside = attention_dtype(device, dtype)
    why = "faster than bfloat16 in torch's CPU attention" if inside != dtype else "torch's fused kernel"
    return [
        Choice("attention", f"per document, {str(inside).removeprefix('torch.')}", why),
        Choice("cross-entropy", "chunked, float32 sums", "the step's logits never exist at once"),
        Choice("norm, rotary, swiglu", "plain PyTorch", "runs on every device"),
    ]
