"""An operator's form that trains and its definition: timed in turn, compared with float64. Loads neither
pydantic nor rich, which machines that are lent for measuring may lack.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from glm_accelerate.bench.operators import Case, Outputs, cases
from glm_accelerate.bench.peak import seconds_of
from glm_accelerate.models.decoder import Decoder

LEAST_SECONDS = 0.05  # of one measurement: what is faster is repeated
FEW_TOKENS = 96  # on which errors are measured in float64
COPIED = 2**27  # bytes whose copy measures the memory's bandwidth


@dataclass(frozen=True, slots=True)
class OperatorFigures:
    """Forward and backward together. Errors are the largest of outputs and gradients against float64, as a
    share of the largest number there.
    """

    name: str
    seconds: float
    reference_seconds: float
    bytes: int  # to be moved if each number were read or written once a pass
    error: float
    reference_error: float


def judged(model: Decoder, lengths: Sequence[int], targets: int, rounds: int) -> Iterator[OperatorFigures]:
    """All operators of a model that trains, for packed documents of these lengths."""
    few = _few(lengths)
    for little, case in zip(cases(model, few, sum(few) // 2), cases(model, lengths, targets), strict=True):
        yield _measured(case, rounds, *_errors(little))


def _measured(case: Case, rounds: int, error: float, reference_error: float) -> OperatorFigures:
    wanted = (*case.inputs, *case.parameters)
    outputs = case.run(*case.inputs)
    grad_outputs = [torch.randn_like(output) for output in outputs]
    moved = 3 * _size(case.inputs) + 2 * _size(outputs) + 2 * case.read
    del outputs

    def ours() -> object:
        return torch.autograd.grad(case.run(*case.inputs), wanted, grad_outputs)

    def by_definition() -> object:
        return torch.autograd.grad(case.definition(*wanted), wanted, grad_outputs)

    device = case.inputs[0].device
    seconds, reference = _in_turn((ours, by_definition), rounds, device)
    return OperatorFigures(case.name, seconds, reference, moved, error, reference_error)


def _in_turn(works: Sequence[Callable[[], object]], rounds: int, device: torch.device) -> tuple[float, ...]:
    """The median seconds of each; the first time, in which it may be compiled, does not count."""
    times = [max(1, round(LEAST_SECONDS / seconds_of(work, 1, device, warm=True))) for work in works]
    seconds = [
        [seconds_of(work, count, device) for work, count in zip(works, times, strict=True)]
        for _ in range(rounds)
    ]
    return tuple(median(column) for column in zip(*seconds, strict=True))


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def bandwidth(device: torch.device) -> float:
    """Bytes a second that a large copy reads and writes."""
    source, target = (torch.ones(COPIED, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * COPIED / min(seconds_of(lambda: target.copy_(source), 1, device, warm=True) for _ in range(5))


def _errors(case: Case) -> tuple[float, float]:
    """The errors of the form that trains and of the definition, in the dtype that trains."""
    narrow = (*case.inputs, *case.parameters)
    wide = tuple(each.detach().double().requires_grad_() for each in narrow)
    exact = _values(lambda: case.definition(*wide), wide)
    reference = _values(lambda: case.definition(*narrow), narrow)
    if case.module is not None:
        case.module.eval()  # without dropout
    ours = _values(lambda: case.run(*case.inputs), narrow)
    if case.module is not None:
        case.module.train()
    return _error(ours, exact), _error(reference, exact)


def _values(work: Callable[[], Outputs], wanted: Outputs) -> list[Tensor]:
    """Outputs, and gradients for output gradients that are the same in every dtype."""
    outputs = work()
    generator = torch.Generator().manual_seed(0)
    grad_outputs = [
        torch.randn(output.shape, generator=generator).bfloat16().to(output.device, output.dtype)
        for output in outputs
    ]
    return [*outputs, *torch.autograd.grad(outputs, wanted, grad_outputs)]


def _error(results: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    pairs = zip(results, exact, strict=True)
    with torch.no_grad():
        return max(float((one.double() - true).abs().max() / true.abs().max()) for one, true in pairs)


def _few(lengths: Sequence[int]) -> tuple[int, ...]:
    """The first documents, shortened to FEW_TOKENS together."""
    few: list[int] = []
    for length in lengths:
        left = FEW_TOKENS - sum(few)
        if left > 1:
            few.append(min(length, max(2, left * 2 // 3) if len(lengths) > 1 else left))
    return tuple(few)
