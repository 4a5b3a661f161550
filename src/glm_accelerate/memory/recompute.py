"""Which results blocks keep until backward: the plan of least recomputation under a budget of bytes, and how
it is applied to blocks from outside. Losses and gradients are the same bit by bit (docs/why/recompute.md).
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint, noop_context_fn

Call = tuple[str, int]  # an operator's name, and which of its calls in a block, from 0
Keep = tuple[Call, ...] | None  # whose results stay until backward, beside the block's input; None: all
PARTS = 1024  # bytes are counted in so many parts of what keeping everything takes, unless asked otherwise


@dataclass(frozen=True, slots=True)
class BlockOption:
    """One way to treat a block. Bytes do not count its input."""

    keep: Keep
    kept: int  # bytes from its forward pass to its backward pass
    returned: int  # bytes that come back when it is recomputed
    seconds: float  # of recomputation


@dataclass(frozen=True, slots=True)
class BlockCosts:
    """What was measured of a block. Its output is the input of the next, and counted there."""

    given: int  # bytes of its input
    options: tuple[BlockOption, ...]
    working: int = 0  # bytes that its passes need besides, at their worst moment
    left: int = 0  # bytes of gradients that its backward pass leaves

    def option(self, keep: Keep) -> BlockOption:
        return next(option for option in self.options if option.keep == keep)


FROZEN = BlockCosts(0, (BlockOption(None, 0, 0, 0.0),))  # no gradient flows back through it
Plan = tuple[Keep, ...]  # of each block of a chain


def plan_from_json(keeps: Sequence[Sequence[Sequence[Any]] | None]) -> Plan:
    """The plan after a way through JSON, which has lists for tuples."""
    return tuple(
        keep if keep is None else tuple((str(name), int(nth)) for name, nth in keep) for keep in keeps
    )


@dataclass(frozen=True, slots=True)
class Cost:
    """Most bytes that the chain holds at once, and seconds of recomputation."""

    peak: int
    seconds: float


def cost(chain: Sequence[BlockCosts], plan: Plan) -> Cost:
    """The backward pass of a plan, moment by moment. Its forward pass never holds more: a block that runs
    forward has what it has when it runs backward, and less lies before it.
    """
    options = [block.option(keep) for block, keep in zip(chain, plan, strict=True)]
    alive = sum(block.given for block in chain) + sum(option.kept for option in options)
    peak = 0
    for block, option in zip(reversed(chain), reversed(options), strict=True):
        peak = max(peak, alive + option.returned + block.working)
        alive += block.left - block.given - option.kept
    return Cost(peak, sum(option.seconds for option in options))


def choose(chain: Sequence[BlockCosts], budget: int, grain: int | None = None) -> Plan | None:
    """The plan of least time that holds at most `budget` bytes, or None where there is none.

    The most that a chain's end holds depends on what is before it by a sum alone: dynamic programming from
    the last block to the first, with one front of (bytes, seconds) that nothing beats. Exact with a grain of
    1; else bytes are rounded up to whole grains: it misses the optimum by at most a grain a block, and never
    promises less than a plan needs.
    """
    everything = cost(chain, (None,) * len(chain)).peak
    fronts = _fronts(chain, max(1, everything // PARTS) if grain is None else grain)
    plans = [_plan(chain, fronts, index) for index in range(len(fronts[0].peak))]
    costs = [(cost(chain, plan), plan) for plan in plans]
    fit = [(each.seconds, each.peak, plan) for each, plan in costs if each.peak <= budget]
    return min(fit, key=lambda entry: entry[:2])[2] if fit else None


@dataclass(frozen=True, slots=True)
class _Front:
    """Ways to treat the blocks from one on, with ascending bytes: each one's option of that block, and which
    entry of the next front is its rest.
    """

    peak: NDArray[np.int64]
    seconds: NDArray[np.float64]
    option: NDArray[np.int64]
    rest: NDArray[np.int64]


def _fronts(chain: Sequence[BlockCosts], grain: int) -> list[_Front]:
    """The fronts of every end of the chain, the whole first, the empty one last. Bytes are in grains."""

    def grains(counts: Sequence[int]) -> NDArray[np.int64]:
        return np.array([-(-count // grain) for count in counts], np.int64)

    nothing = np.zeros(1, np.int64)
    front = _Front(nothing, np.zeros(1), nothing, nothing)
    fronts, left = [front], 0
    for block in reversed(chain):
        given, working, gradients = grains([block.given, block.working, block.left]).tolist()
        kept = given + grains([option.kept for option in block.options])
        inside = grains([option.returned for option in block.options]) + working + left
        peak = kept[:, None] + np.maximum(inside[:, None], front.peak)
        seconds = np.array([option.seconds for option in block.options])[:, None] + front.seconds
        best = _unbeaten(peak.ravel(), seconds.ravel())
        front = _Front(peak.ravel()[best], seconds.ravel()[best], *np.unravel_index(best, peak.shape))
        fronts.append(front)
        left += gradients
    return fronts[::-1]


def _unbeaten(peak: NDArray[np.int64], seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    """Which entries have less time than all with as few bytes, from the fewest bytes on."""
    order = np.lexsort((seconds, peak))
    sorted_seconds = seconds[order]
    before = np.concatenate([[np.inf], np.minimum.accumulate(sorted_seconds)[:-1]])
    return order[sorted_seconds < before]


def _plan(chain: Sequence[BlockCosts], fronts: Sequence[_Front], index: int) -> Plan:
    keeps: list[Keep] = []
    for block, front in zip(chain, fronts[:-1], strict=True):
        keeps.append(block.options[front.option[index]].keep)
        index = int(front.rest[index])
    return tuple(keeps)


def apply(blocks: Sequence[nn.Module], plan: Plan) -> None:
    """Recompute as planned. Blocks take positional arguments."""
    for block, keep in zip(blocks, plan, strict=True):
        if keep is not None:
            context = partial(contexts, keep) if keep else noop_context_fn
            block.forward = partial(_recomputed, block.forward, context)


def _recomputed(forward: Callable[..., Any], context: Callable[[], Any], *inputs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs)
    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=context)


def contexts(calls: Sequence[Call]) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """For a forward pass, which keeps what these calls return, and for its recomputation, which takes it."""
    operators: defaultdict[Any, set[int]] = defaultdict(set)
    for name, nth in calls:  # as `aten.mm.default`
        operators[attrgetter(name)(torch.ops)].add(nth)
    kept: dict[tuple[Any, int], Any] = {}
    return _Keeping(operators, kept), _Taking(operators, kept)


class _Counting(TorchDispatchMode):
    """Counts the calls of some operators, of which it keeps results."""

    def __init__(self, operators: Mapping[Any, set[int]], kept: dict[tuple[Any, int], Any]) -> None:
        super().__init__()
        self.operators, self.kept = operators, kept
        self.counts: Counter[Any] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # what torch.compile fuses is not seen

    def wanted(self, func: Any) -> int | None:
        """The number of this call, if it is one whose result is kept."""
        nths = self.operators.get(func)
        if nths is None:
            return None
        nth = self.counts[func]
        self.counts[func] += 1
        return nth if nth in nths else None


class _Keeping(_Counting):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        nth = self.wanted(func)
        if nth is not None:  # detached: autograd hangs the graph on what is returned
            self.kept[func, nth] = tree_map_only(Tensor, Tensor.detach, out)
        return out


class _Taking(_Counting):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        nth = self.wanted(func)
        if nth is None:
            return func(*args, **(kwargs or {}))
        assert (func, nth) in self.kept, "a second backward pass over what was kept for one"
        return self.kept.pop((func, nth))
