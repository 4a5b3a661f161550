"""Where the time of one step goes, by what its operators do.

On a CPU an operator's own time counts; on a GPU that of its kernels, by their names. What no operator or
kernel fills is Python, launching, and waiting.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import profile

from glm_accelerate.runtime.device import device_of
from glm_accelerate.runtime.env import quiet_profiler

PRODUCTS, ATTENTION, OPTIMIZER = "matrix products", "attention", "optimizer and clipping"
ELEMENTWISE, COPIES, COMMUNICATION = "element-wise and sums", "copies and casts", "communication"
DATA, GAPS = "waiting for data", "Python, launching and gaps"
CLASSES = (PRODUCTS, ATTENTION, ELEMENTWISE, COPIES, OPTIMIZER, COMMUNICATION, DATA, GAPS)

# The first pattern that matches the name decides.
OPERATORS = (
    (COMMUNICATION, r"^nccl:|^gloo:|^c10d::|all_reduce|all_gather|reduce_scatter"),
    (OPTIMIZER, r"^Optimizer\.step|fused_adam|fused_adagrad|fused_sgd|_foreach_"),
    (ATTENTION, r"scaled_dot_product|attention|aten::(baddbmm|bmm)"),
    (PRODUCTS, r"aten::(addmm|mm|_scaled_mm|linear|_int_mm|_addmm)|mkldnn.*linear|onednn|gemm|qmatmul"),
    (COPIES, r"aten::(copy_|_to_copy|clone|contiguous|cat|index|index_select|embedding|slice_scatter)"),
    (
        GAPS,  # these only make a new view or find memory
        r"aten::(\w*view\w*|_unsafe_view|reshape|t|transpose|expand|as_strided|slice|select|split\w*|chunk|narrow"
        r"|unbind|(un)?flatten|(un)?squeeze|permute|detach|alias|empty\w*|to|result_type|resolve_\w+)$",
    ),
    (ELEMENTWISE, r"^(aten|glm_accelerate)::|CompiledFxGraph|Torch-Compiled Region"),
)
KERNELS = (
    (COMMUNICATION, r"nccl"),
    (ATTENTION, r"flash|fmha|attention|attn|softmax_warp|sdpa"),
    (PRODUCTS, r"gemm|nvjet|cutlass|xmma|cublas|wgmma|matmul|splitkreduce|gemv"),
    (OPTIMIZER, r"adam|multi_tensor_apply|lpnorm"),
    (
        COPIES,
        r"memcpy|memset|direct_copy|bfloat16_copy|float16_copy|copy_kernel|CatArray|index_select|gather",
    ),
    (ELEMENTWISE, r""),
)
OWNERS = (COMMUNICATION, OPTIMIZER, ATTENTION)  # what runs inside these belongs to them
STEP = "glm-accelerate step"
WAITS = re.compile(r"^[a-z]+(Stream|Event)Synchronize$")  # of CUDA, of HIP


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator or kernel over the whole step."""

    name: str
    kind: str
    calls: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of one profiled step by class and by operator."""

    seconds: float
    classes: dict[str, float]
    operators: tuple[Operator, ...]  # the longest first
    kernels: bool  # of a GPU are what was timed, not operators on the CPU
    synchronisations: int | None  # how often Python waited for the device; None without a GPU


def profiled(step: Callable[[], float], device: torch.device) -> Breakdown:
    """`step` does one step to its end and returns the seconds for which it waited for data."""
    quiet_profiler()
    record = device_of(device)
    with profile(activities=record.profiled, acc_events=True) as recorded:
        with torch.profiler.record_function(STEP):
            waited = step()
        record.synchronize()
    return summed(list(recorded.events() or []), waited)


def summed(events: Sequence[FunctionEvent], waited: float) -> Breakdown:
    """The breakdown from a profile's events, one of which is the step itself."""
    (whole,) = (event for event in events if event.name == STEP and event.device_type == DeviceType.CPU)
    seconds = (whole.time_range.end - whole.time_range.start) / 1e6
    # Kernels and copies, not the names that are put over several of them.
    kernels = [
        event
        for event in events
        if event.device_type != DeviceType.CPU and not event.is_user_annotation and event.name != STEP
    ]
    inside = [event for event in events if event.device_type == DeviceType.CPU]
    if kernels:
        named = [(event.name, _kind(event.name, KERNELS), event.time_range.elapsed_us()) for event in kernels]
    else:
        named = [(event.name, _kind_of_operator(event), event.self_cpu_time_total) for event in inside]
    operators = _operators(named)
    classes: dict[str, float] = dict.fromkeys(CLASSES, 0.0)
    for operator in operators:
        classes[operator.kind] += operator.seconds
    classes[DATA] = waited
    classes[GAPS] += max(0.0, seconds - sum(classes.values()))
    return Breakdown(
        seconds=seconds,
        classes=classes,
        operators=tuple(sorted(operators, key=lambda operator: -operator.seconds)),
        kernels=bool(kernels),
        synchronisations=sum(_waits(event, whole) for event in inside) if kernels else None,
    )


def _waits(event: FunctionEvent, whole: FunctionEvent) -> bool:
    """Within the step: the profiler waits for the device too, after it."""
    return bool(WAITS.match(event.name)) and event.time_range.start < whole.time_range.end


def _operators(named: Sequence[tuple[str, str | None, float]]) -> list[Operator]:
    """Added up by name and class; microseconds become seconds."""
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for name, kind, microseconds in named:
        if kind is not None:
            times[name, kind].append(microseconds / 1e6)
    return [Operator(name, kind, len(each), sum(each)) for (name, kind), each in times.items()]


def _kind(name: str, table: Sequence[tuple[str, str]]) -> str | None:
    return next((kind for kind, pattern in table if re.search(pattern, name, re.IGNORECASE)), None)


def _kind_of_operator(event: FunctionEvent) -> str | None:
    """None for what is no operator: its own time is Python's."""
    own = _kind(event.name, OPERATORS)
    if own is None or event.name.startswith("Optimizer.step"):
        return None
    above, owner = event.cpu_parent, own
    while above is not None:
        kind = _kind(above.name, OPERATORS)
        owner = kind if kind in OWNERS else owner
        above = above.cpu_parent
    return owner
