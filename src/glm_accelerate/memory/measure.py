"""What a block's operators take and keep, learnt by running it: the options that a plan chooses from.

When a block is recomputed every operator runs again but those whose results were kept, so time saved and
bytes kept are sums over operators, and the best choices are those with the most time a byte.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from glm_accelerate.memory.alive import Alive, storages
from glm_accelerate.memory.chain import FROZEN, BlockCosts, BlockOption, Call
from glm_accelerate.memory.selective import contexts
from glm_accelerate.runtime.device import device_of

UNWRITTEN = ("aten.empty", "aten.new_empty")  # memory that a kernel fills unseen: keeping it saves nothing


@dataclass(frozen=True, slots=True)
class OperatorResult:
    """What one operator made, with those that wrote into it afterwards: kept together or not at all."""

    calls: tuple[Call, ...]
    kept: int  # bytes that stay if it is kept
    saved: int  # of them, what backward wants anyway
    seconds: float  # to make it again


@dataclass(frozen=True, slots=True)
class Trace:
    """A block's forward pass."""

    results: tuple[OperatorResult, ...]  # that may be kept
    saved: int  # bytes that backward wants, without the block's input and output
    seconds: float  # until the last of them is there
    finish: float  # from there to the block's end
    calls: int  # of operators


def measure(block: nn.Module, *inputs: Any, repeats: int = 5) -> BlockCosts:
    """A block's options, from a few passes on `inputs`, whose first is a tensor, the result before it.

    Nothing is left behind: no gradient, and random generators are as they were.
    """
    x = inputs[0].detach()
    with device_of(x.device).fork_random():
        _Pass(block, x, inputs[1:]).forward()  # whatever a first call sets up
        traced = trace(block, *inputs, repeats=repeats)
        toll = _toll(x) * traced.calls
        working = _Pass(block, x, inputs[1:]).working()
    trained = sum(p.numel() * p.element_size() for p in block.parameters() if p.requires_grad)
    return BlockCosts(x.numel() * x.element_size(), options(traced, toll), working, trained, traced.finish)


def measure_all(
    blocks: Sequence[nn.Module], *inputs: Any, joins: bool = True, repeats: int = 5
) -> list[BlockCosts]:
    """The same of a whole chain on blocks of one width: each kind is measured once, by its weights' shapes.

    A block before the first that trains has no way back. `joins`: all are given the same but their input.
    """
    kinds: dict[object, BlockCosts] = {}
    found: list[BlockCosts] = []
    for block in blocks:
        weights = [(name, p.shape, p.dtype, p.requires_grad) for name, p in block.named_parameters()]
        learns = inputs[0].requires_grad or any(requires for *_, requires in weights)
        if not learns and all(before is FROZEN for before in found):
            found.append(FROZEN)
            continue
        kind = (type(block), *weights)
        if kind not in kinds:
            kinds[kind] = replace(measure(block, *inputs, repeats=repeats), joins=joins)
        found.append(kinds[kind])
    return found


def options(traced: Trace, toll: float) -> tuple[BlockOption, ...]:
    """All, nothing, and between them the results with the most seconds a byte, one more each time.

    `toll`: seconds that choosing among operators costs by itself.
    """
    found = [BlockOption(None, traced.saved, 0, 0.0), BlockOption((), 0, traced.saved, traced.seconds)]
    calls: list[Call] = []
    kept, returned, seconds = 0, traced.saved, traced.seconds + toll
    for result in sorted(traced.results, key=lambda each: (-each.seconds / max(1, each.kept), each.calls)):
        calls += result.calls
        kept, returned, seconds = kept + result.kept, returned - result.saved, seconds - result.seconds
        if kept < traced.saved:  # else keeping all costs no more and takes no time
            found.append(BlockOption(tuple(sorted(calls)), kept, returned, max(0.0, seconds)))
    return tuple(found)


def trace(block: nn.Module, *inputs: Any, repeats: int = 5) -> Trace:
    """Operator by operator; the times are medians."""
    run = _Pass(block, inputs[0].detach(), inputs[1:])
    before, seen = _Recorder(run.device), _Recorder(run.device)
    before.watch(run)
    output = seen.watch(run)
    times = [_Recorder(run.device).time(run) for _ in range(repeats)]
    whole = median(_seconds(run.forward, run.device) for _ in range(repeats))
    for op, *seconds in zip(seen.ops, *times, strict=True):
        op.seconds = median(seconds)
    # What two passes save alike was there before them: weights, positions, the input.
    lasting = {id(storage) for storage in before.saved}
    own = {id(s): s.nbytes() for s in seen.saved if id(s) not in lasting | {_key(output)}}
    taken = sum(op.seconds for op in seen.ops[: seen.needed])
    finish = sum(op.seconds for op in seen.ops[seen.needed :])
    between = max(0.0, whole - taken - finish)  # what no operator sees: Python, and kernels of our own
    results = tuple(_results(seen.ops, seen.needed, own, _key(output)))
    return Trace(results, sum(own.values()), taken + between, finish, len(seen.ops))


def _results(ops: Sequence["_Op"], needed: int, own: dict[int, int], output: int) -> Iterator[OperatorResult]:
    """What operators made, without what must not be kept: random numbers, which the recomputation has to
    draw too, and what is read before all is written into it. `own`: what backward wants.
    """
    groups: dict[int, _Group] = {}  # by storage
    for place, op in enumerate(ops):
        for storage in op.read:
            if storage in groups and storage not in op.wrote:
                groups[storage].reads.append(place)
        group = _Group([place], op.made, barred=op.barred)
        for storage in op.wrote:
            group = group.joined(groups.get(storage, _Group(barred=True)))  # what was there before: never
        groups |= dict.fromkeys(group.sizes, group)
    for group in {id(group): group for group in groups.values()}.values():
        seconds = sum(ops[place].seconds for place in group.places if place < needed)
        early = any(group.places[0] < read < group.places[-1] for read in group.reads)
        if not (group.barred or early) and seconds:
            kept = {storage: size for storage, size in group.sizes.items() if storage != output}
            saved = sum(size for storage, size in kept.items() if storage in own)
            yield OperatorResult(
                tuple(ops[place].call for place in group.places), sum(kept.values()), saved, seconds
            )


@dataclass(slots=True)
class _Group:
    """Operators that write into the same storages."""

    places: list[int] = field(default_factory=list[int])
    sizes: dict[int, int] = field(default_factory=dict[int, int])
    reads: list[int] = field(default_factory=list[int])
    barred: bool = False

    def joined(self, other: "_Group") -> "_Group":
        places = sorted({*self.places, *other.places})
        return _Group(places, self.sizes | other.sizes, self.reads + other.reads, self.barred or other.barred)


@dataclass(slots=True)
class _Op:
    """A call of an operator, with storages by their keys."""

    call: Call
    made: dict[int, int]  # and their bytes
    wrote: list[int]
    read: list[int]
    barred: bool
    seconds: float = 0.0


class _Pass:
    """A block on its inputs."""

    def __init__(self, block: nn.Module, x: Tensor, others: tuple[Any, ...]) -> None:
        self.block, self.others = block, others
        self.x = x.requires_grad_()
        self.device = x.device

    def forward(self) -> Tensor:
        return self.block(self.x, *self.others)

    def working(self) -> int:
        """Bytes beyond what is kept, at the worst moment of either pass, with the gradient that comes in."""
        trained = [parameter for parameter in self.block.parameters() if parameter.requires_grad]
        with Alive() as alive:
            out = self.forward()
            running = alive.most - alive.now
            slope = torch.ones_like(out)
            begun = alive.now
            alive.mark()
            torch.autograd.grad(out, [self.x, *trained], slope, allow_unused=True)
            return max(alive.most - begun, running) + slope.nbytes


class _Recorder(TorchDispatchMode):
    """What a forward pass calls, makes and saves. Holds on to it, so that no storage comes twice."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.ops: list[_Op] = []
        self.saved: list[torch.UntypedStorage] = []
        self.needed = 0  # operators until the last that saved something
        self._counts: Counter[str] = Counter()
        self._held: list[object] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # as the contexts of recomputation do

    def watch(self, run: _Pass) -> Tensor:
        with saved_tensors_hooks(self._pack, lambda kept: kept), self:
            return run.forward()

    def time(self, run: _Pass) -> list[float]:
        with self:
            run.forward()
        return [op.seconds for op in self.ops]

    def _pack(self, tensor: Tensor) -> Tensor:
        self.saved.append(tensor.untyped_storage())
        self.needed = len(self.ops)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:  # autograd's own, more or fewer as it saves results
            return func(*args, **(kwargs or {}))
        lucky = torch.Tag.nondeterministic_seeded in func.tags
        before = device_of(self.device).random_states() if lucky else []
        begun = device_of(self.device).clock()
        out = func(*args, **(kwargs or {}))
        seconds = device_of(self.device).clock() - begun
        drawn = lucky and not all(map(torch.equal, before, device_of(self.device).random_states()))
        name = str(func)
        given = {id(storage) for storage in storages((args, kwargs))}
        made = {id(s): s.nbytes() for s in storages(out) if id(s) not in given}
        wrote = _written(func, args, kwargs or {})
        looks = not made and not wrote and bool(storages(out))  # a view: nothing is read yet
        barred = drawn or name.startswith(UNWRITTEN)
        self.ops.append(
            _Op((name, self._counts[name]), made, wrote, [] if looks else [*given], barred, seconds)
        )
        self._counts[name] += 1
        self._held.append(out)
        return out


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[int]:
    """Storages of the arguments that an operator writes into."""
    by_name = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    writes = (a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return [id(storage) for name in writes for storage in storages(by_name.get(name))]


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    begun = device_of(device).clock()
    done = work()  # held: freeing is not part of it
    seconds = device_of(device).clock() - begun
    del done
    return seconds


def _toll(x: Tensor) -> float:
    """Seconds that both contexts of selective recomputation add to one operator."""
    calls = 100

    def work() -> None:
        for _ in range(calls):
            x.view(-1)

    plain = min(_seconds(work, x.device) for _ in range(3))
    total = 0.0
    for mode in contexts({}):
        with mode:
            total += min(_seconds(work, x.device) for _ in range(3)) - plain
    return max(0.0, total / calls)


def _key(tensor: Tensor) -> int:
    return id(tensor.untyped_storage())
