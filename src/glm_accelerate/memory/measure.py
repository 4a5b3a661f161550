"""What a block's operators take and keep, measured by running it: the options that a plan chooses from.

When a block is recomputed every operator runs again but those whose results were kept, so time saved and
bytes kept are sums over operators, and the best choices are those with the most time a byte.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from glm_accelerate.memory.recompute import FROZEN, BlockCosts, BlockOption, Call, contexts
from glm_accelerate.runtime.device import device_of
from glm_accelerate.runtime.devices.record import Device

UNWRITTEN = ("aten.empty", "aten.new_empty")  # memory that a kernel fills unseen: keeping it saves nothing
TIMED = 100  # calls of an operator, to measure what looking at each costs


@dataclass(frozen=True, slots=True)
class OperatorResult:
    """What one operator returned, with those that wrote into it afterwards: kept together or not at all."""

    calls: tuple[Call, ...]
    kept: int  # bytes that stay if it is kept
    saved: int  # of them, what backward wants anyway
    seconds: float  # to compute it again


@dataclass(frozen=True, slots=True)
class Trace:
    """A block's forward pass."""

    results: tuple[OperatorResult, ...]  # that may be kept
    saved: int  # bytes that backward wants, without the block's input and output
    seconds: float  # until the last of them is there
    calls: int  # of operators


def measure(block: nn.Module, *inputs: Any, repeats: int = 5) -> BlockCosts:
    """A block's options, from a few passes on `inputs`, whose first is a tensor, the result before it.

    Nothing is left behind: no gradient, and random generators are as they were.
    """
    x = inputs[0].detach().requires_grad_()
    forward = partial(block.forward, x, *inputs[1:])
    trained = [parameter for parameter in block.parameters() if parameter.requires_grad]
    device = device_of(x.device)
    with device.fork_random():
        forward()  # whatever a first call sets up
        traced = trace(block, *inputs, repeats=repeats)
        overhead = _overhead(x, device) * traced.calls
        working = _working(forward, [x, *trained])
    left = sum(parameter.nbytes for parameter in trained)
    return BlockCosts(x.nbytes, options(traced, overhead), working, left)


def measure_all(
    blocks: Sequence[nn.Module],
    *inputs: Any,
    repeats: int = 5,
    around: Callable[[nn.Module], AbstractContextManager[object]] = nullcontext,
) -> list[BlockCosts]:
    """The costs of a chain of blocks of one width: each kind is measured once, by its weights' shapes, within
    `around`. No gradient flows through a block before the first that trains.
    """
    kinds: dict[object, BlockCosts] = {}
    chain: list[BlockCosts] = []
    for block in blocks:
        weights = [(name, p.shape, p.dtype, p.requires_grad) for name, p in block.named_parameters()]
        trains = inputs[0].requires_grad or any(requires for *_, requires in weights)
        if not trains and all(before is FROZEN for before in chain):
            chain.append(FROZEN)
            continue
        kind = (type(block), *weights)
        if kind not in kinds:
            with around(block):
                kinds[kind] = measure(block, *inputs, repeats=repeats)
        chain.append(kinds[kind])
    return chain


def options(traced: Trace, overhead: float) -> tuple[BlockOption, ...]:
    """All, nothing, and between them the results with the most seconds a byte, one more each time.

    `overhead`: seconds that choosing among operators costs by itself.
    """
    found = [BlockOption(None, traced.saved, 0, 0.0), BlockOption((), 0, traced.saved, traced.seconds)]
    calls: list[Call] = []
    kept, returned, seconds = 0, traced.saved, traced.seconds + overhead
    for result in sorted(traced.results, key=lambda each: (-each.seconds / max(1, each.kept), each.calls)):
        calls += result.calls
        kept, returned, seconds = kept + result.kept, returned - result.saved, seconds - result.seconds
        if kept < traced.saved:  # else keeping all costs no more and takes no time
            found.append(BlockOption(tuple(sorted(calls)), kept, returned, max(0.0, seconds)))
    return tuple(found)


def trace(block: nn.Module, *inputs: Any, repeats: int = 5) -> Trace:
    """Operator by operator; the times are medians."""
    x = inputs[0].detach().requires_grad_()
    forward, device = partial(block.forward, x, *inputs[1:]), device_of(x.device)
    before, seen = _Recorder(device), _Recorder(device)
    before.watch(forward)
    output = id(seen.watch(forward).untyped_storage())
    times = [_Recorder(device).time(forward) for _ in range(repeats)]
    whole = median(_seconds(forward, device) for _ in range(repeats))
    for op, *seconds in zip(seen.ops, *times, strict=True):
        op.seconds = median(seconds)
    # What two passes save alike was there before them: weights, positions, the input.
    lasting = {id(storage) for storage in before.saved}
    own = {id(s): s.nbytes() for s in seen.saved if id(s) not in lasting | {output}}
    needed = sum(op.seconds for op in seen.ops[: seen.needed])
    finish = sum(op.seconds for op in seen.ops[seen.needed :])
    between = max(0.0, whole - needed - finish)  # what no operator sees: Python, and kernels of our own
    results = tuple(_results(seen.ops, seen.needed, own, output))
    return Trace(results, sum(own.values()), needed + between, len(seen.ops))


def _results(ops: Sequence["_Op"], needed: int, own: dict[int, int], output: int) -> Iterator[OperatorResult]:
    """What operators returned, without what must not be kept: random numbers, which the recomputation has to
    draw too, and what is read before all is written into it. `own`: what backward wants.
    """
    groups: dict[int, _Group] = {}  # by storage
    for place, op in enumerate(ops):
        for storage in op.read:
            if storage in groups and storage not in op.wrote:
                groups[storage].reads.append(place)
        group = _Group([place], op.returned, barred=op.barred)
        for storage in op.wrote:
            group = group.joined(groups.get(storage, _Group(barred=True)))  # what was there before: never
        groups |= dict.fromkeys(group.sizes, group)
    for group in {id(group): group for group in groups.values()}.values():
        seconds = sum(ops[place].seconds for place in group.places if place < needed)
        early = any(group.places[0] < read < group.places[-1] for read in group.reads)
        if not (group.barred or early) and seconds:
            calls = tuple(ops[place].call for place in group.places)
            kept = {storage: size for storage, size in group.sizes.items() if storage != output}
            saved = sum(size for storage, size in kept.items() if storage in own)
            yield OperatorResult(calls, sum(kept.values()), saved, seconds)


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
    returned: dict[int, int]  # new storages, and their bytes
    wrote: list[int]
    read: list[int]
    barred: bool
    seconds: float


class _Recorder(TorchDispatchMode):
    """What a forward pass calls, returns and saves. Holds on to it, so that no storage comes twice."""

    def __init__(self, device: Device) -> None:
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

    def watch(self, forward: Callable[[], Tensor]) -> Tensor:
        with saved_tensors_hooks(self._pack, lambda kept: kept), self:
            return forward()

    def time(self, forward: Callable[[], Tensor]) -> list[float]:
        with self:
            forward()
        return [op.seconds for op in self.ops]

    def _pack(self, tensor: Tensor) -> Tensor:
        self.saved.append(tensor.untyped_storage())
        self.needed = len(self.ops)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:  # autograd's own, more or fewer as it saves results
            return func(*args, **(kwargs or {}))
        may_draw = torch.Tag.nondeterministic_seeded in func.tags
        before = self.device.random_states() if may_draw else []
        begun = self.device.clock()
        out = func(*args, **(kwargs or {}))
        seconds = self.device.clock() - begun
        drawn = may_draw and not all(map(torch.equal, before, self.device.random_states()))
        name = str(func)
        given = {id(storage) for storage in _storages((args, kwargs))}
        returned = {id(s): s.nbytes() for s in _storages(out) if id(s) not in given}
        wrote = _written(func, args, kwargs or {})
        view = not returned and not wrote and bool(_storages(out))  # nothing is read yet
        read = [] if view else [*given]
        barred = drawn or name.startswith(UNWRITTEN)
        self.ops.append(_Op((name, self._counts[name]), returned, wrote, read, barred, seconds))
        self._counts[name] += 1
        self._held.append(out)
        return out


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[int]:
    """Storages of the arguments that an operator writes into. Sums over ranks do, and do not say so."""
    if func.namespace == "c10d":
        return [id(storage) for storage in _storages((args, kwargs))]
    by_name = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    writes = (a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return [id(storage) for name in writes for storage in _storages(by_name.get(name))]


def _seconds(work: Callable[[], object], device: Device) -> float:
    begun = device.clock()
    result = work()  # held: freeing is not part of it
    seconds = device.clock() - begun
    del result
    return seconds


def _overhead(x: Tensor, device: Device) -> float:
    """Seconds that both contexts of selective recomputation add to one operator."""

    def work() -> None:
        for _ in range(TIMED):
            x.view(-1)

    plain = min(_seconds(work, device) for _ in range(3))
    total = 0.0
    for mode in contexts(()):
        with mode:
            total += min(_seconds(work, device) for _ in range(3)) - plain
    return max(0.0, total / TIMED)


def _working(forward: Callable[[], Tensor], inputs: Sequence[Tensor]) -> int:
    """Bytes beyond what is kept, at the worst moment of either pass, with the gradient that comes in."""
    with Alive() as alive:
        out = forward()
        running = alive.most - alive.now
        gradient = torch.ones_like(out)
        begun = alive.most = alive.now
        torch.autograd.grad(out, inputs, gradient, allow_unused=True)
        return max(alive.most - begun, running) + gradient.nbytes


class Alive(TorchDispatchMode):
    """While it is entered, `now` and `most` count the bytes of tensors that operators returned and that are
    not yet freed, on any device. What an operator takes and gives back inside itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(storage) for storage in _storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            if id(storage) not in before and id(storage) not in self._known:
                self._watch(storage)
        return out

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # what torch.compile fuses makes its tensors unseen

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, count = id(storage), storage.nbytes()

        def freed(_: object) -> None:
            self.now -= count
            del self._known[key]

        self._known[key] = weakref.ref(storage, freed)
        self.now += count
        self.most = max(self.most, self.now)


def _storages(tree: object) -> list[torch.UntypedStorage]:
    """The storages of every tensor within. While one lives it is the same object: its id names it."""
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
