"""A plan of recomputation put on blocks from outside, through `torch.utils.checkpoint`: blocks that know
nothing of it are called as before, and losses and gradients are the same bit by bit.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from glm_accelerate.memory.chain import Call, Plan

Operators = dict[Any, frozenset[int]]  # which calls of an operator


def apply(blocks: Sequence[nn.Module], plan: Plan) -> Callable[[], None]:
    """Recompute as planned; what is returned takes it back.

    Blocks take positional arguments, the first the result of the one before. Those that share a segment are
    given the same others; the first of them runs them all, and the rest pass their input on.
    """
    assert sum(segment.blocks for segment in plan.segments) == len(blocks), "a plan of other blocks"
    before = [block.__dict__.get("forward") for block in blocks]
    start = 0
    for segment in plan.segments:
        inside = blocks[start : start + segment.blocks]
        start += segment.blocks
        if segment.keep is None:
            continue
        together = _Segment(inside, segment.keep)
        for nth, block in enumerate(inside):
            block.forward = partial(together.run, nth)

    def undo() -> None:
        for block, forward in zip(blocks, before, strict=True):
            block.__dict__.pop("forward", None)
            block.__dict__.update({"forward": forward} if forward is not None else {})

    return undo


def contexts(operators: Operators) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """For a forward pass, which keeps what these calls return, and for its recomputation, which takes it."""
    kept: dict[tuple[Any, int], Any] = {}
    return _Keeping(operators, kept), _Taking(operators, kept)


def operators_of(calls: Sequence[Call]) -> Operators:
    """The operators by their names, as `aten.mm.default`."""
    found: dict[Any, set[int]] = {}
    for name, nth in calls:
        space, packet, overload = name.split(".")
        found.setdefault(getattr(getattr(getattr(torch.ops, space), packet), overload), set()).add(nth)
    return {operator: frozenset(nths) for operator, nths in found.items()}


class _Segment:
    """Blocks that are recomputed together."""

    def __init__(self, blocks: Sequence[nn.Module], keep: Sequence[Call]) -> None:
        self._forwards = [block.forward for block in blocks]
        self._context = partial(contexts, operators_of(keep)) if keep else None
        self._passed: tuple[Any, ...] = ()  # what the first block of several returned, and its other inputs

    def run(self, nth: int, *inputs: Any) -> Any:
        """As the forward pass of the block of that number."""
        if not torch.is_grad_enabled():
            return self._forwards[nth](*inputs)
        if nth == 0:
            out = self._recomputed(inputs)
            self._passed = (out, *inputs[1:]) if len(self._forwards) > 1 else ()
            return out
        same = len(inputs) == len(self._passed) and all(map(_is, inputs, self._passed))
        assert same, "blocks of one segment are called in turn, on the result before and the same inputs"
        if nth == len(self._forwards) - 1:
            self._passed = ()
        return inputs[0]

    def _recomputed(self, inputs: tuple[Any, ...]) -> Any:
        if self._context is None:
            return checkpoint(self._all, *inputs, use_reentrant=False)
        return checkpoint(self._all, *inputs, use_reentrant=False, context_fn=self._context)

    def _all(self, x: Any, *others: Any) -> Any:
        for forward in self._forwards:
            x = forward(x, *others)
        return x


def _is(a: object, b: object) -> bool:
    return a is b


class _Counting(TorchDispatchMode):
    """Counts the calls of some operators."""

    def __init__(self, operators: Operators, kept: dict[tuple[Any, int], Any]) -> None:
        super().__init__()
        self.operators, self.kept = operators, kept
        self.counts: Counter[Any] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # what torch.compile fuses runs on, and is not seen

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
