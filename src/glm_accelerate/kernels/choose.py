"""Which path an operator takes on a device, and why. Shown once at the start of a run."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Choice:
    """A path by name and the reason for it."""

    operator: str
    path: str
    why: str


SHORT = 300  # tokens: a document up to here is faster in float32 on a CPU, a longer one in bfloat16


def attention_dtype(device: torch.device, dtype: torch.dtype, length: int) -> torch.dtype:
    """In which numbers a document of `length` attends, for activations of `dtype`."""
    return torch.float32 if device.type == "cpu" and dtype == torch.bfloat16 and length <= SHORT else dtype


def cache_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """In which numbers keys and values are cached: torch's masked attention in bfloat16 crawls on a CPU."""
    return torch.float32 if device.type == "cpu" and dtype == torch.bfloat16 else dtype


def choices(device: torch.device, dtype: torch.dtype, compiled: bool = False) -> list[Choice]:
    """Every operator's path for activations of `dtype` on `device`; `compiled`: while it trains."""
    if compiled:
        return _compiled_choices(device, dtype)
    name = str(dtype).removeprefix("torch.")
    if attention_dtype(device, dtype, 1) != dtype:
        name = f"float32 up to {SHORT} tokens, then {name}"
    return [
        Choice("attention", f"torch's, per document, {name}", "no document sees another"),
        Choice("cross-entropy", "chunked, float32 sums", "the step's logits never exist at once"),
        Choice("norm, rotary, swiglu, LoRA", "PyTorch, own backward", "runs on every device, keeps little"),
    ]


def _compiled_choices(device: torch.device, dtype: torch.dtype) -> list[Choice]:
    others = choices(device, dtype)
    attention = Choice("attention", "blocks of bfloat16 products", "what lies between them is compiled")
    return [
        attention if device.type == "cpu" and dtype == torch.bfloat16 else others[0],
        Choice("cross-entropy", "chunked, float32 sums, compiled", others[1].why),
        Choice("norm, residual sum, swiglu", "compiled", "one loop each way"),
        Choice("LoRA", "PyTorch, own backward", others[2].why),
    ]
