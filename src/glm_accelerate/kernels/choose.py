"""Which form an operator takes on a device, and why. Shown once at the start of a run."""

from dataclasses import dataclass
from typing import Literal

import torch

from glm_accelerate.kernels.attention_path import BY_DOCUMENT, Facts, attention_path
from glm_accelerate.runtime.device import device_kind

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


def choose_form(
    facts: Facts, dtype: torch.dtype, compiled: bool, native: str | None = NOT_ASKED
) -> tuple[Form, str]:
    """The form of what lies between matrix products. `compiled`: the plan asks for compiled operators.
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
    """What is evaluated or generated comes in too many shapes to be compiled, and stays eager."""
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
