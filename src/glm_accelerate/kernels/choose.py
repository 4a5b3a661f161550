"""Which form an operator takes on a device, and why. Pure functions of the device's facts."""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch

from glm_accelerate.kernels.triton_here import no_triton
from glm_accelerate.runtime.device import device_kind, device_of

# eager: PyTorch's operators with an own backward pass. compiled: one loop each way, made by torch.compile.
# triton: one kernel each way. native: our own C++, for bfloat16 on CPUs that multiply it in hardware.
Form = Literal["eager", "compiled", "triton", "native"]
NAMES: dict[Form, str] = {
    "eager": "PyTorch, own backward",
    "compiled": "compiled",
    "triton": "Triton",
    "native": "own C++",
}
NOT_ASKED = "not asked for"
SHORT = 300  # tokens: a document up to here is faster in float32 on a CPU, a longer one in bfloat16
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


@dataclass(frozen=True, slots=True)
class Choice:
    """A path by name and the reason for it."""

    operator: str
    path: str
    why: str


def attention_dtype(device: torch.device, dtype: torch.dtype, length: int) -> torch.dtype:
    """The dtype of a document's attention, for activations of `dtype`."""
    return torch.float32 if device.type == "cpu" and dtype == torch.bfloat16 and length <= SHORT else dtype


def cache_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The dtype of cached keys and values: torch's masked attention in bfloat16 is slow on a CPU."""
    return torch.float32 if device.type == "cpu" and dtype == torch.bfloat16 else dtype


def choose_form(
    facts: Facts, dtype: torch.dtype, compiled: bool, native: str | None = NOT_ASKED
) -> tuple[Form, str]:
    """The form of operators between matrix products. `compiled`: the plan asks for compiled operators.
    `native`: why our own C++ does not run here, or None.
    """
    if dtype == torch.float64:
        return "eager", "the other forms sum in float32"
    if facts.triton:
        return "triton", "one kernel each way"
    if compiled and native is None:
        return "native", "one pass each way"
    if compiled:
        return "compiled", "one loop each way"
    if device_kind(facts.device).gpu_kernels:
        return "eager", f"SLOW: Triton would save most passes over memory. {facts.no_triton}"
    return "eager", "runs on every device, keeps little"


def form_now(form: Form, training: bool) -> Form:
    """Evaluation and generation have too many shapes to be compiled, and stay eager."""
    return "eager" if form == "compiled" and not training else form


@dataclass(frozen=True, slots=True)
class OperatorWork:
    """What a model computes, as far as a path depends on it."""

    dtype: torch.dtype
    sandwich: bool  # GLM-4-0414's norms after each branch
    head_width: int
    training: bool
    compiled: bool  # asked for by the plan
    prefix: bool = False  # P-tuning's keys before every document
    native: str | None = NOT_ASKED  # why our own CPU operators do not run; None: they do


def choices(facts: Facts, work: OperatorWork) -> list[Choice]:
    """The path of every operator between matrix products, and the reason."""
    chosen, why = choose_form(facts, work.dtype, work.compiled, work.native)
    form = form_now(chosen, work.training)
    if form != chosen:
        why = "compiled in training alone: what is evaluated has too many lengths"
    name, loss = NAMES[form], NAMES[chosen]  # the loss comes in chunks of few sizes
    rotary = Choice("rotary positions", name, why)
    if form in ("compiled", "native"):
        rotary = Choice("rotary positions", NAMES["eager"], "alone they gain nothing")
    between = "norm, sum and norm" if work.sandwich else "sum and norm"
    return [
        Choice("norm", name, why),
        Choice(between, f"{name}, one after the other" if form == "eager" else f"{name}, in one pass", why),
        Choice("swiglu", name, why),
        *_attention_choices(facts, work, rotary),
        Choice("cross-entropy", f"chunked, float32 sums, {loss}", "the step's logits never exist at once"),
    ]


def _attention_choices(facts: Facts, work: OperatorWork, rotary: Choice) -> list[Choice]:
    if facts.device != "cpu":
        path, why = attention_path(facts, work.dtype, work.head_width, work.training, work.prefix)
        return [rotary, Choice("attention", path, why)]
    if work.native is None and not work.prefix:
        path = "own C++ in bfloat16, rotary positions with it"
        return [Choice("attention", path, "a document's scores stay in cache")]
    name = str(work.dtype).removeprefix("torch.")
    if attention_dtype(torch.device("cpu"), work.dtype, 1) != work.dtype:
        name = f"float32 up to {SHORT} tokens, then {name}"
    lacking = work.compiled and work.dtype == torch.bfloat16 and work.native
    why = f"SLOW: {lacking}" if lacking else "no document sees another"
    return [rotary, Choice("attention", f"torch's, {BY_DOCUMENT}, {name}", why)]


@cache
def attention_path(
    facts: Facts,
    dtype: torch.dtype,
    head_width: int,
    training: bool,
    prefix: bool = False,
    pieces: bool = False,
) -> tuple[str, str]:
    """The path's name and the reason. `prefix`: learnt keys stand before every document (P-tuning); `pieces`:
    keys of other ranks stand before pieces of documents.
    """
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
    if prefix or pieces or not 16 <= head_width <= 256:
        only = "heads of 16 to 256, no prefix and no pieces of documents"
        return BY_DOCUMENT, f"{missing}, and FlexAttention takes {only}"
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
