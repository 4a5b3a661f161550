"""An operator's form that trains beside its definition: both timed in turn, both judged against float64."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from glm_accelerate.bench.operators import Case, Outputs, cases
from glm_accelerate.bench.peak import seconds_of
from glm_accelerate.models.decoder import Decoder

LEAST_SECONDS = 0.05  # of one measurement: what is faster is repeated
FEW_TOKENS = 96  # on which errors are judged in float64
COPIED = 2**27  # bytes whose copy tells the memory's bandwidth


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
    slopes = [torch.randn_like(output) for output in outputs]
    moved = 3 * _size(case.inputs) + 2 * _size(outputs) + 2 * case.read
    del outputs

    def mine() -> object:
        return torch.autograd.grad(case.run(*case.inputs), wanted, slopes)

    def plain() -> object:
        return torch.autograd.grad(case.definition(*wanted), wanted, slopes)

    device = case.inputs[0].device
    seconds, reference = _in_turn((mine, plain), rounds, device)
    return OperatorFigures(case.name, seconds, reference, moved, error, reference_error)


def _in_turn(works: Sequence[Callable[[], object]], rounds: int, device: torch.device) -> tuple[float, ...]:
    """The median seconds of each; the first time, in which it may be compiled, does not count."""
    times = [max(1, round(LEAST_SECONDS / seconds_of(work, 1, device, warm=True))) for work in works]
    taken = [
        [seconds_of(work, count, device) for work, count in zip(works, times, strict=True)]
        for _ in range(rounds)
    ]
    return tuple(median(column) for column in zip(*taken, strict=True))


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def bandwidth(device: torch.device) -> float:
    """Bytes a second that a large copy reads and writes."""
    source, target = (torch.ones(COPIED, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * COPIED / min(seconds_of(lambda: target.copy_(source), 1, device, warm=True) for _ in range(5))


def _errors(case: Case) -> tuple[float, float]:
    """Of the form that trains and of the definition, in the dtype that trains."""
    given = (*case.inputs, *case.parameters)
    wide = tuple(each.detach().double().requires_grad_() for each in given)
    exact = _values(lambda: case.definition(*wide), wide)
    plain = _values(lambda: case.definition(*given), given)
    if case.module is not None:
        case.module.eval()  # its dropout rests
    mine = _values(lambda: case.run(*case.inputs), given)
    if case.module is not None:
        case.module.train()
    return _error(mine, exact), _error(plain, exact)


def _values(work: Callable[[], Outputs], wanted: Outputs) -> list[Tensor]:
    """Outputs, and the gradients for slopes that are the same whatever the dtype."""
    outputs = work()
    generator = torch.Generator().manual_seed(0)
    slopes = [
        torch.randn(output.shape, generator=generator).bfloat16().to(output.device, output.dtype)
        for output in outputs
    ]
    return [*outputs, *torch.autograd.grad(outputs, wanted, slopes)]


def _error(results: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    pairs = zip(results, exact, strict=True)
    with torch.no_grad():
        return max(float((one.double() - true).abs().max() / true.abs().max()) for one, true in pairs)


def _few(lengths: Sequence[int]) -> tuple[int, ...]:
    """The first documents, shortened, as far as there is room."""
    taken: list[int] = []
    for length in lengths:
        left = FEW_TOKENS - sum(taken)
        if left > 1:
            taken.append(min(length, max(2, left * 2 // 3) if len(lengths) > 1 else left))
    return tuple(taken)
