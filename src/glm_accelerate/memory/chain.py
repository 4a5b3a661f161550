"""A chain of blocks as far as recomputation goes: what each may keep, a plan for all, and what it costs.

forward   | block 0 | block 1 | block 2 |         each leaves what it keeps
backward                      | 2 | 1 | 0 |       each recomputes the rest, and lets go of all
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Self

Call = tuple[str, int]  # an operator's name, and which of its calls in a block, from 0
Keep = tuple[Call, ...] | None  # whose results stay until backward, beside the block's input; None: all


def keep_of(calls: Sequence[Sequence[Any]] | None) -> Keep:
    """What JSON made of it."""
    return None if calls is None else tuple((str(name), int(nth)) for name, nth in calls)


@dataclass(frozen=True, slots=True)
class BlockOption:
    """One way to treat a block. Bytes do not count its input."""

    keep: Keep
    kept: int  # bytes from its forward pass to its backward pass
    returned: int  # bytes that come back when it is recomputed
    seconds: float  # of recomputation

    @property
    def bare(self) -> bool:
        """Nothing but the input is kept."""
        return self.keep == ()


@dataclass(frozen=True, slots=True)
class BlockCosts:
    """What is known of a block. What it returns is the input of the next, and counted there."""

    given: int  # bytes of its input
    options: tuple[BlockOption, ...]
    working: int = 0  # bytes that its passes need besides, at their worst moment
    left: int = 0  # bytes of gradients that its backward pass leaves
    finish: float = 0.0  # seconds from the last thing that backward needs to the block's end
    joins: bool = True  # it may share a segment: it is given what its neighbours are, besides its input

    @property
    def bare(self) -> BlockOption | None:
        """How it is kept within a segment of several blocks, if it may be."""
        return next((option for option in self.options if option.bare and self.joins), None)

    def option(self, keep: Keep) -> BlockOption:
        return next(option for option in self.options if option.keep == keep)


FROZEN = BlockCosts(0, (BlockOption(None, 0, 0, 0.0),))  # no gradient flows back through it


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbours that are recomputed together: of several only the input of the first is kept."""

    blocks: int
    keep: Keep


@dataclass(frozen=True, slots=True)
class Plan:
    """Segments that tile the chain."""

    segments: tuple[Segment, ...]

    @staticmethod
    def from_json(said: Mapping[str, Any]) -> "Plan":
        """What `asdict` gave, through JSON or not."""
        return Plan(tuple(Segment(int(s["blocks"]), keep_of(s["keep"])) for s in said["segments"]))

    @classmethod
    def everything(cls, blocks: int) -> Self:
        """All is kept, nothing recomputed."""
        return cls((Segment(1, None),) * blocks)

    @classmethod
    def each(cls, blocks: int) -> Self:
        """Every block keeps its input alone."""
        return cls((Segment(1, ()),) * blocks)

    @classmethod
    def rooted(cls, blocks: int, size: int | None = None) -> Self:
        """Segments of `size` blocks, or the square root of all, that keep their input alone."""
        size = size or max(1, round(blocks**0.5))
        return cls(tuple(Segment(min(size, blocks - start), ()) for start in range(0, blocks, size)))


@dataclass(frozen=True, slots=True)
class Cost:
    """Most bytes that the chain holds at once, and seconds of recomputation."""

    peak: int
    seconds: float


def cost(chain: Sequence[BlockCosts], plan: Plan) -> Cost:
    """The backward pass of a plan, moment by moment. Its forward pass never holds more: a block that runs
    forward has what it has when it runs backward, and less lies before it.
    """
    options = options_of(chain, plan)
    alive = sum(chain[start].given for start, _ in _spans(plan)) + sum(option.kept for option in options)
    peak, seconds = 0, 0.0
    for start, stop in reversed(_spans(plan)):
        inside, ways = chain[start:stop], options[start:stop]
        alive += sum(way.returned for way in ways) + sum(block.given for block in inside[1:])
        seconds += sum(way.seconds for way in ways) + sum(block.finish for block in inside[:-1])
        for block, way in zip(reversed(inside), reversed(ways), strict=True):
            peak = max(peak, alive + block.working)
            alive += block.left - block.given - way.kept - way.returned
    return Cost(peak, seconds)


def _spans(plan: Plan) -> list[tuple[int, int]]:
    """Where the segments begin and end."""
    ends = [0, *accumulate(segment.blocks for segment in plan.segments)]
    return list(pairwise(ends))


def options_of(chain: Sequence[BlockCosts], plan: Plan) -> list[BlockOption]:
    """The option of every block."""
    keeps = [segment.keep for segment in plan.segments for _ in range(segment.blocks)]
    assert all(segment.blocks == 1 or segment.keep == () for segment in plan.segments)
    return [block.option(keep) for block, keep in zip(chain, keeps, strict=True)]


def kept_bytes(chain: Sequence[BlockCosts], plan: Plan) -> tuple[int, ...]:
    """Bytes that stay of every block besides its input; less than none inside a segment, whose blocks keep
    not even that.
    """
    options = options_of(chain, plan)
    inner = [nth > 0 for segment in plan.segments for nth in range(segment.blocks)]
    return tuple(
        option.kept - (block.given if within else 0)
        for block, option, within in zip(chain, options, inner, strict=True)
    )
