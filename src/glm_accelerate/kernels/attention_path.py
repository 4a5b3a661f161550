"""Which attention runs over packed rows on a device, and why: a pure function of the device's facts."""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch

from glm_accelerate.kernels.triton_here import no_triton
from glm_accelerate.runtime.device import device_kind, device_of

VARLEN, FLASH, FLEX, BY_DOCUMENT = "torch varlen", "flash-attn", "FlexAttention", "by document"
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the choice depends on. `capability` is (8, 0) for an A100, (9, 0) for an H100 or H200."""

    device: str
    capability: tuple[int, int] = (0, 0)
    torch_flash: bool = False  # torch was built with flash attention
    flash_attn: bool = False  # the package is installed
    triton: bool = False  # its kernels run here
    no_triton: str = "Triton is missing (pip install triton)"  # why they do not


@cache
def facts_of(device: torch.device) -> Facts:
    """Looked up once a process."""
    record = device_of(device)
    if not record.gpu_kernels:
        return Facts(device.type)
    lack = no_triton()
    return Facts(
        device.type,
        record.capability(),
        record.flash_attention(),
        find_spec("flash_attn") is not None,
        lack is None,
        " ".join((lack[0], f"({lack[1]})" if lack[1] else "")).strip() if lack else "",
    )


@cache
def attention_path(
    facts: Facts, dtype: torch.dtype, head_width: int, training: bool, prefix: bool = False
) -> tuple[str, str]:
    """The path's name and the reason. `prefix`: learnt keys stand before every document (P-tuning)."""
    refused = _refused(facts, dtype)
    if refused:
        return BY_DOCUMENT, refused
    narrow = _refused_by_flash(facts, head_width, training)
    if facts.torch_flash and not narrow:
        return VARLEN, "one launch for all documents, keys and values not repeated"
    if facts.flash_attn and not narrow:
        return FLASH, "this torch has no flash attention, the package flash-attn has"
    missing = narrow or "neither torch nor a package has flash attention"
    if not facts.triton:
        return BY_DOCUMENT, f"{missing}, and FlexAttention needs Triton"
    if prefix or not 16 <= head_width <= 256:
        return BY_DOCUMENT, f"{missing}, and FlexAttention takes heads of 16 to 256 and no prefix"
    return FLEX, f"{missing}; a mask of blocks skips what is not seen"


def _refused(facts: Facts, dtype: torch.dtype) -> str | None:
    """Why no kernel for packed rows takes this at all."""
    if not device_kind(facts.device).gpu_kernels:
        return f"packed kernels do not train on {facts.device}"
    if facts.capability < (8, 0):
        return f"packed kernels need compute capability 8.0, this device has {_dotted(facts.capability)}"
    if dtype not in HALF:
        return f"packed kernels take bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    return None


def _refused_by_flash(facts: Facts, head_width: int, training: bool) -> str | None:
    if head_width % 8 or head_width > 256:
        return f"flash attention takes heads of 8, 16, ... 256 numbers, not {head_width}"
    if training and 192 < head_width <= 224 and facts.capability[1]:  # 8.6, 8.9, 12.1; see torch's sdp_utils
        return (
            f"flash attention does not train heads of {head_width} on capability {_dotted(facts.capability)}"
        )
    return None


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
