"""The cheapest recomputation under a budget of bytes, and all budgets at once, by dynamic programming.

The most that a chain's end holds depends on what is before it by a sum alone. So from the last block to the
first there is one front of (bytes, seconds) that nothing beats, and that of the first is the whole curve.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from glm_accelerate.memory.chain import BlockCosts, Cost, Plan, Segment, cost

PARTS = 1024  # bytes are counted in so many parts of what keeping everything takes, unless said otherwise


@dataclass(frozen=True, slots=True)
class Point:
    """A plan that no other beats in both."""

    plan: Plan
    cost: Cost


@dataclass(frozen=True, slots=True)
class _Step:
    """One way to begin a chain's end: a segment, and its bytes and seconds."""

    segment: Segment
    kept: int
    inside: int  # most bytes while its own backward pass runs, beside what it kept
    seconds: float


@dataclass(frozen=True, slots=True)
class _Front:
    """Of the blocks from one on, with ascending bytes: each entry's first step, and where the rest is."""

    peak: NDArray[np.int64]
    seconds: NDArray[np.float64]
    step: NDArray[np.int64]
    rest: NDArray[np.int64]
    steps: tuple[_Step, ...]


def curve(chain: Sequence[BlockCosts], grain: int | None = None) -> list[Point]:
    """Every plan worth having, from the least memory to the least time.

    Exact with a grain of 1; else bytes are rounded up to whole grains, which misses the optimum by a grain
    a block at most and never promises less than a plan needs.
    """
    everything = cost(chain, Plan.everything(len(chain))).peak
    fronts = _fronts(chain, max(1, everything // PARTS) if grain is None else grain)
    points: list[Point] = []
    for index in range(len(fronts[0].peak)):
        plan = _plan(fronts, index)
        points.append(Point(plan, cost(chain, plan)))
    return points


def choose(chain: Sequence[BlockCosts], budget: int, grain: int | None = None) -> Point | None:
    """The plan of least time that holds at most `budget` bytes, or None where there is none."""
    fit = [point for point in curve(chain, grain) if point.cost.peak <= budget]
    return min(fit, key=lambda point: (point.cost.seconds, point.cost.peak), default=None)


def _fronts(chain: Sequence[BlockCosts], grain: int) -> list[_Front]:
    """Of every end of the chain, the whole chain first; the last is the empty one."""
    coarse = [_rounded(block, grain) for block in chain]
    left = [*reversed(list(accumulate((block.left for block in reversed(coarse)), initial=0)))]
    nothing = np.zeros(1, np.int64)
    fronts = [_Front(nothing, np.zeros(1), nothing, nothing, ())]  # reversed: [0] is the chain's end
    for start in reversed(range(len(chain))):
        steps = [*_single(coarse, left, start), *_joined(coarse, left, start)]
        rests = [fronts[len(chain) - start - step.segment.blocks] for step in steps]
        peak = np.concatenate(
            [s.kept + np.maximum(s.inside, r.peak) for s, r in zip(steps, rests, strict=True)]
        )
        seconds = np.concatenate([s.seconds + r.seconds for s, r in zip(steps, rests, strict=True)])
        step = np.repeat(np.arange(len(steps)), [len(rest.peak) for rest in rests])
        rest = np.concatenate([np.arange(len(rest.peak)) for rest in rests])
        best = _unbeaten(peak, seconds)
        fronts.append(_Front(peak[best], seconds[best], step[best], rest[best], tuple(steps)))
    return fronts[::-1]


def _single(chain: Sequence[BlockCosts], left: Sequence[int], start: int) -> list[_Step]:
    block = chain[start]
    return [
        _Step(
            Segment(1, option.keep),
            block.given + option.kept,
            option.returned + block.working + left[start + 1],
            option.seconds,
        )
        for option in block.options
    ]


def _joined(chain: Sequence[BlockCosts], left: Sequence[int], start: int) -> list[_Step]:
    """Segments of several blocks from `start` on, as far as all may keep nothing."""
    steps: list[_Step] = []
    before, inside, seconds = 0, 0, 0.0  # of what returns: before the block, most at once; of recomputation
    for stop in range(start, len(chain)):
        block, bare = chain[stop], chain[stop].bare
        if bare is None:
            break
        before += bare.returned + (block.given if stop > start else 0)
        inside = max(inside, before + block.working + left[stop + 1])
        if stop > start:
            steps.append(
                _Step(Segment(stop + 1 - start, ()), chain[start].given, inside, seconds + bare.seconds)
            )
        seconds += bare.seconds + block.finish
    return steps


def _unbeaten(peak: NDArray[np.int64], seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    """Which entries have less time than all with as few bytes, from the fewest bytes on."""
    order = np.lexsort((seconds, peak))
    sorted_seconds = seconds[order]
    before = np.concatenate([[np.inf], np.minimum.accumulate(sorted_seconds)[:-1]])
    return order[sorted_seconds < before]


def _plan(fronts: Sequence[_Front], index: int) -> Plan:
    segments: list[Segment] = []
    start = 0
    while start < len(fronts) - 1:
        front = fronts[start]
        segments.append(front.steps[front.step[index]].segment)
        index = int(front.rest[index])
        start += segments[-1].blocks
    return Plan(tuple(segments))


def _rounded(block: BlockCosts, grain: int) -> BlockCosts:
    """In whole grains, never fewer."""

    def up(count: int) -> int:
        return -(-count // grain)

    options = tuple(replace(way, kept=up(way.kept), returned=up(way.returned)) for way in block.options)
    sizes = {"given": up(block.given), "working": up(block.working), "left": up(block.left)}
    return replace(block, options=options, **sizes)
