"""Time and error of each way to compute a case of `cases.py`, for `table.py`."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from benchmarks.kernels.cases import Case, Function

COPIED = 2**30  # bytes whose copy tells the memory's bandwidth
CACHE = 2**28  # bytes that leave nothing else in any cache
WAIT = 2_000_000  # cycles of the device, about a millisecond
WARM, TIMES = 5, 50


@dataclass(frozen=True, slots=True)
class Figures:
    """One line of the table. Errors are against float64, as a share of the largest number there."""

    operator: str
    way: str
    forward_seconds: float
    both_seconds: float  # forward and backward
    forward_share: float  # of the bandwidth, by the numbers that have to be moved
    both_share: float
    forward_error: float | None
    gradient_error: float | None
    ok: bool | None  # by the house rule; None: not judged


def measured(
    case: Case, ways: dict[str, Function], device: torch.device, dtype: torch.dtype, rate: float
) -> list[Figures]:
    """All ways to compute a case. By the first one, the definition, the others are judged."""
    inputs = draw(case, device, dtype)
    exact = None
    if case.judged:
        exact = values(case.plain, [x.detach().double().requires_grad_(x.requires_grad) for x in inputs])
    allowed: list[float] | None = None
    lines: list[Figures] = []
    for way, function in ways.items():
        forward, gradients, ok = None, None, None
        if exact is not None:
            found = [errors(*pair) for pair in zip(values(function, inputs), exact, strict=True)]
            every = [*found[0], *found[1]]
            allowed = allowed or [2 * error + torch.finfo(dtype).eps for error in every]
            ok = all(error <= limit for error, limit in zip(every, allowed, strict=True))
            forward, gradients = max(found[0]), max(found[1])
        slopes = slopes_of(outputs(function, inputs))
        one = seconds(partial(outputs, function, inputs), device)
        both = seconds(partial(gradients_of, function, inputs, slopes), device)
        share = case.forward * dtype.itemsize / one / rate
        share_of_both = (case.forward + case.backward) * dtype.itemsize / both / rate
        lines.append(Figures(case.name, way, one, both, share, share_of_both, forward, gradients, ok))
    return lines


def draw(case: Case, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator).to(device, dtype) for shape in case.inputs]
    return [x.requires_grad_(place < case.trained) for place, x in enumerate(made)]


def bandwidth(device: torch.device) -> float:
    """Bytes a second that a large copy reads and writes."""
    source = torch.ones(COPIED if device.type == "cuda" else 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), device)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """The median of the device's own time, from a cold cache. On a CPU, where kernels are interpreted, one
    call: it says nothing.
    """
    if device.type == "cpu":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    for _ in range(WARM):
        work()
    cold = torch.empty(CACHE, dtype=torch.uint8, device=device)
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(TIMES)]
    for begin, end in pairs:
        cold.zero_()
        torch.cuda._sleep(WAIT)  # until all of the work is queued: what is measured has no gaps
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) for begin, end in pairs) / 1e3


def outputs(function: Function, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    made = function(*inputs)
    return made if isinstance(made, tuple) else (made,)


def gradients_of(
    function: Function, inputs: Sequence[Tensor], slopes: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    wanted = [x for x in inputs if x.requires_grad]
    return torch.autograd.grad(outputs(function, inputs), wanted, list(slopes))


def slopes_of(made: Sequence[Tensor]) -> list[Tensor]:
    """The same in every dtype."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(out.shape, generator=generator).bfloat16().to(out.device, out.dtype) for out in made]


def values(function: Function, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients, from copies: some kernels write over what they are given."""
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    made = outputs(function, leaves)
    found = [out.detach().clone() for out in made]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return found, list(torch.autograd.grad(made, wanted, slopes_of(made)))


def errors(found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    pairs = zip(found, exact, strict=True)
    return [((one.double() - true).abs().max() / true.abs().max()).item() for one, true in pairs]
