"""Plans of recomputation against every plan that there is."""

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from glm_accelerate.memory.chain import BlockCosts, BlockOption, Plan, Segment, cost, kept_bytes
from glm_accelerate.memory.recompute import choose, curve


def some_chain(generator: random.Random) -> list[BlockCosts]:
    """Two to five blocks with up to four options. Seconds are whole, so that sums are exact."""

    def block() -> BlockCosts:
        options = [BlockOption(None, generator.randint(1, 40), 0, 0.0)]
        if generator.random() < 0.9:
            options.append(BlockOption((), 0, generator.randint(1, 50), float(generator.randint(0, 30))))
        for nth in range(generator.randint(0, 2)):
            kept, returned = generator.randint(0, 30), generator.randint(0, 30)
            options.append(BlockOption((("op", nth),), kept, returned, float(generator.randint(0, 20))))
        left = generator.randint(0, 8)
        working, finish = left + generator.randint(0, 12), float(generator.randint(0, 3))
        return BlockCosts(generator.randint(1, 6), tuple(options), working, left, finish)

    return [block() for _ in range(generator.randint(2, 5))]


def every_plan(chain: Sequence[BlockCosts]) -> Iterator[Plan]:
    def of(start: int) -> Iterator[tuple[Segment, ...]]:
        if start == len(chain):
            yield ()
            return
        firsts = [Segment(1, option.keep) for option in chain[start].options]
        stops = range(start + 2, len(chain) + 1)
        bare = (stop for stop in stops if all(block.bare for block in chain[start:stop]))
        firsts.extend(Segment(stop - start, ()) for stop in bare)
        for first in firsts:
            for rest in of(start + first.blocks):
                yield (first, *rest)

    return map(Plan, of(0))


def replayed(chain: Sequence[BlockCosts], plan: Plan) -> tuple[int, float]:
    """Peak and seconds by keeping a ledger of what is alive in both passes, piece by piece."""
    alive: dict[object, int] = {}
    peak, seconds, start = 0, 0.0, 0
    spans: list[range] = []

    def look(extra: int) -> None:
        nonlocal peak
        peak = max(peak, sum(alive.values()) + extra)

    for segment in plan.segments:
        span = range(start, start + segment.blocks)
        spans.append(span)
        alive["input", start] = chain[start].given
        for i in span:
            way = chain[i].option(segment.keep)
            inner = chain[i].given if i > start else 0
            look(inner + way.kept + way.returned + chain[i].working)
            alive["kept", i] = way.kept
        start = span.stop
    for segment, span in zip(reversed(plan.segments), reversed(spans), strict=True):
        for i in span:
            way = chain[i].option(segment.keep)
            alive["input", i], alive["returned", i] = chain[i].given, way.returned
            seconds += way.seconds + (chain[i].finish if i + 1 < span.stop else 0)
        for i in reversed(span):
            look(chain[i].working)
            for what in ("input", "kept", "returned"):
                del alive[what, i]
            alive["gradients", i] = chain[i].left
    return peak, seconds


def test_the_optimum_is_that_of_brute_force_on_200_chains() -> None:
    generator = random.Random(5)
    for _ in range(200):
        chain = some_chain(generator)
        known = [(plan, *replayed(chain, plan)) for plan in every_plan(chain)]
        for plan, peak, seconds in known[:50]:
            assert (cost(chain, plan).peak, cost(chain, plan).seconds) == (peak, seconds)
        points = curve(chain, grain=1)
        found = [(point.cost.peak, point.cost.seconds) for point in points]
        unbeaten = [
            pair
            for pair in sorted({(peak, seconds) for _, peak, seconds in known})
            if not any(p <= pair[0] and s <= pair[1] and (p, s) != pair for _, p, s in known)
        ]
        assert found == unbeaten
        budget = generator.randint(min(found)[0] - 3, max(found)[0] + 3)
        fit = [seconds for _, peak, seconds in known if peak <= budget]
        chosen = choose(chain, budget, grain=1)
        assert (chosen is None) == (not fit)
        if chosen is not None:
            assert chosen.cost.seconds == min(fit)
            assert chosen.cost.peak <= budget


def uniform(blocks: int) -> list[BlockCosts]:
    big = 10_000_019  # no round number
    options = (
        BlockOption(None, big, 0, 0.0),
        BlockOption((("swiglu", 0),), big * 2 // 3, big // 3, 0.01),
        BlockOption((), 0, big, 0.1),
    )
    return [BlockCosts(1_000_003, options, 2_000_000, 0, 0.005)] * blocks


def test_known_rules_are_plans_like_any_other() -> None:
    chain = uniform(16)
    everything, each = cost(chain, Plan.everything(16)), cost(chain, Plan.each(16))
    root = cost(chain, Plan.rooted(16))
    assert [segment.blocks for segment in Plan.rooted(16).segments] == [4, 4, 4, 4]
    assert [segment.blocks for segment in Plan.rooted(7, 3).segments] == [3, 3, 1]
    assert everything.seconds == 0
    assert round(each.seconds, 9) == 1.6
    assert round(root.seconds, 9) == round(1.6 + 12 * 0.005, 9)
    assert root.peak < everything.peak
    for rule in (everything, each, root):
        best = choose(chain, rule.peak, grain=1)
        assert best is not None
        assert best.cost.seconds <= rule.seconds
    freed = choose(chain, each.peak, grain=1)
    assert freed is not None
    assert freed.cost.seconds < each.seconds  # the last block's results are needed at once: they stay


def test_a_grain_never_promises_too_little_and_misses_little() -> None:
    chain = uniform(61)
    exact_low = cost(chain, Plan.each(61)).peak
    budget = 300_000_000
    coarse = choose(chain, budget)
    assert coarse is not None
    assert coarse.cost.peak <= budget
    grain = cost(chain, Plan.everything(61)).peak // 1024
    fine = choose(chain, budget - 122 * grain, grain=100_000)
    assert fine is not None
    assert coarse.cost.seconds <= fine.cost.seconds
    assert curve(chain)[0].cost.peak <= exact_low
    assert choose(chain, 1_000_000) is None


def test_gradients_that_stay_are_counted() -> None:
    options = (BlockOption(None, 100, 0, 0.0), BlockOption((), 0, 100, 1.0))
    chain = [BlockCosts(1, options, working=80, left=80)] * 3
    # At block 0: its input, what it kept, the gradients of two blocks and of its own.
    assert cost(chain, Plan.everything(3)).peak == 303 + 80
    assert cost(chain, Plan.each(3)).peak == 1 + 100 + 160 + 80
    assert cost(chain, Plan((Segment(3, ()),))).peak == 303 + 80


def test_a_plan_survives_json_and_says_what_each_block_keeps() -> None:
    chain = uniform(5)
    plan = Plan((Segment(1, (("swiglu", 0),)), Segment(1, None), Segment(3, ())))
    assert Plan.from_json(json.loads(json.dumps(asdict(plan)))) == plan
    assert Plan.from_json(asdict(plan)) == plan
    assert kept_bytes(chain, plan) == (6_666_679, 10_000_019, 0, -1_000_003, -1_000_003)


def test_blocks_that_must_be_kept_whole_are_not_joined() -> None:
    whole = BlockCosts(1, (BlockOption(None, 50, 0, 0.0),))
    free = BlockCosts(1, (BlockOption(None, 50, 0, 0.0), BlockOption((), 0, 50, 1.0)))
    plans = [point.plan for point in curve([free, free, whole, free, free], grain=1)]
    for plan in plans:
        ends = list(itertools.accumulate(segment.blocks for segment in plan.segments))
        assert {2, 3} <= set(ends)
