"""Plans of recomputation against every plan that there is."""

import json
import random
from collections.abc import Sequence
from itertools import product

from glm_accelerate.memory.recompute import BlockCosts, BlockOption, Plan, choose, cost, plan_from_json


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
        return BlockCosts(generator.randint(1, 6), tuple(options), left + generator.randint(0, 12), left)

    return [block() for _ in range(generator.randint(2, 5))]


def replayed(chain: Sequence[BlockCosts], plan: Plan) -> tuple[int, float]:
    """Peak and seconds by keeping a ledger of what is alive in both passes, piece by piece."""
    alive: dict[object, int] = {}
    peak, seconds = 0, 0.0

    def look(extra: int) -> None:
        nonlocal peak
        peak = max(peak, sum(alive.values()) + extra)

    options = [block.option(keep) for block, keep in zip(chain, plan, strict=True)]
    for i, (block, option) in enumerate(zip(chain, options, strict=True)):
        alive["input", i] = block.given
        look(option.kept + option.returned + block.working)
        alive["kept", i] = option.kept
    for i, (block, option) in reversed(list(enumerate(zip(chain, options, strict=True)))):
        alive["returned", i] = option.returned
        seconds += option.seconds
        look(block.working)
        for what in ("input", "kept", "returned"):
            del alive[what, i]
        alive["gradients", i] = block.left
    return peak, seconds


def test_the_optimum_is_that_of_brute_force_on_200_chains() -> None:
    generator = random.Random(5)
    for _ in range(200):
        chain = some_chain(generator)
        plans = list(product(*([option.keep for option in block.options] for block in chain)))
        known = {plan: replayed(chain, plan) for plan in plans}
        for plan in plans[:50]:
            assert (cost(chain, plan).peak, cost(chain, plan).seconds) == known[plan]
        peaks = sorted({peak for peak, _ in known.values()})
        for budget in (peaks[0] - 1, *peaks[:20], generator.randint(peaks[0], peaks[-1]), peaks[-1]):
            fit = [(seconds, peak) for peak, seconds in known.values() if peak <= budget]
            chosen = choose(chain, budget, grain=1)
            assert (chosen is None) == (not fit)
            if chosen is not None:
                assert known[chosen] == min(fit)[::-1]


def uniform(blocks: int) -> list[BlockCosts]:
    big = 10_000_019  # no round number
    options = (
        BlockOption(None, big, 0, 0.0),
        BlockOption((("swiglu", 0),), big * 2 // 3, big // 3, 0.01),
        BlockOption((), 0, big, 0.1),
    )
    return [BlockCosts(1_000_003, options, 2_000_000)] * blocks


def test_known_rules_are_plans_like_any_other() -> None:
    chain = uniform(16)
    everything, inputs_alone = cost(chain, (None,) * 16), cost(chain, ((),) * 16)
    assert everything.seconds == 0
    assert round(inputs_alone.seconds, 9) == 1.6
    assert inputs_alone.peak < everything.peak
    for rule in (everything, inputs_alone):
        best = choose(chain, rule.peak, grain=1)
        assert best is not None
        assert cost(chain, best).seconds <= rule.seconds
    freed = choose(chain, inputs_alone.peak, grain=1)
    assert freed is not None
    # The last block's results are needed at once: they stay.
    assert cost(chain, freed).seconds < inputs_alone.seconds


def test_a_grain_never_promises_too_little_and_misses_little() -> None:
    chain = uniform(61)
    budget = 300_000_000
    coarse = choose(chain, budget)
    assert coarse is not None
    assert cost(chain, coarse).peak <= budget
    grain = cost(chain, (None,) * 61).peak // 1024
    fine = choose(chain, budget - 122 * grain, grain=100_000)
    assert fine is not None
    assert cost(chain, coarse).seconds <= cost(chain, fine).seconds
    assert choose(chain, cost(chain, ((),) * 61).peak) is not None
    assert choose(chain, 1_000_000) is None


def test_gradients_that_stay_are_counted() -> None:
    options = (BlockOption(None, 100, 0, 0.0), BlockOption((), 0, 100, 1.0))
    chain = [BlockCosts(1, options, working=80, left=80)] * 3
    # At block 0: its input, what it kept, the gradients of two blocks and of its own.
    assert cost(chain, (None,) * 3).peak == 303 + 80
    assert cost(chain, ((),) * 3).peak == 1 + 100 + 160 + 80


def test_a_plan_survives_json() -> None:
    plan: Plan = ((("swiglu", 0), ("aten.mm.default", 2)), None, ())
    assert plan_from_json(json.loads(json.dumps(plan))) == plan
    assert plan_from_json(plan) == plan
