"""Step times where long-tailed lengths are dealt by count, tokens and cost, and where one rank has half
its speed: simulated, with the costs of the plan's time model.

python -m benchmarks.layouts.balance [--out DIR]
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import mean

import numpy as np
import torch

from benchmarks.report import Origin, origin, page, publish, table
from glm_accelerate.data.pack import deal
from glm_accelerate.models.sizes import Sizes
from glm_accelerate.plan.cost import Trained, attended_flops, product_flops
from glm_accelerate.plan.hardware import find_device
from glm_accelerate.plan.step_time import ATTENDING

GLM_9B = Sizes(151552, 4096, 13696, 40, 32, 2, 128, 1e-5, 1e4, 64, True, 131072, sandwich=True)
STEPS, EACH, SEED = 200, 16, 0  # steps, samples of a rank in each
MEDIAN, TAIL = 900, 1.2  # tokens; the spread of their logarithm
LONGEST = (16384, 65536)  # tokens: longer ones are cut
ABOUT = f"""
A step takes as long as the rank with the most to do. Costs are those of GLM-4-9B, all weights trained, on
A100: so many seconds a token, and so many a pair of tokens of a document. {STEPS} steps of {EACH} samples a
rank, lengths from a log-normal (median {MEDIAN}, spread {TAIL}), cut at **longest**. **best**: all ranks busy
alike, or the step's longest sample on the fastest, if that takes longer: a mean step. **x**: the mean step by
this way over that; **worst**: of all steps. Count: each rank the same number of samples, in the order drawn.
"""


@dataclass(frozen=True)
class Dealt:
    """How long steps take by one way to deal, over the best."""

    ranks: int
    longest: int
    slowed: bool  # one rank has half its speed
    way: str
    best: float  # seconds of a mean step
    times: float
    worst: float


def costs() -> Callable[[int], float]:
    """Seconds of a sample of so many tokens on one device."""
    device, trained = find_device("A100 80GB"), Trained("full")
    assert device.products is not None
    speed = device.products * device.reached
    token = product_flops(GLM_9B, trained, 1, 1) / speed
    pair = attended_flops(GLM_9B, trained, 1) / speed / ATTENDING
    return lambda length: token * length + pair * length**2 / 2


def by_count(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """As samplers of one batch a rank deal: in the order drawn."""
    return [list(range(rank, len(lengths), ranks)) for rank in range(ranks)]


def ways(
    cost: Callable[[int], float], speeds: Sequence[float]
) -> Iterator[tuple[str, Callable[..., list[list[int]]]]]:
    if min(speeds) == 1:
        yield "count", by_count
        yield "tokens", deal
        yield "cost", lambda lengths, ranks: deal(lengths, ranks, cost)
    else:
        yield "cost, as if all were alike", lambda lengths, ranks: deal(lengths, ranks, cost)
        yield "cost, a smaller share", lambda lengths, ranks: deal(lengths, ranks, cost, speeds=speeds)


def simulated(ranks: int, longest: int, slowed: bool) -> Iterator[Dealt]:
    cost, drawn = costs(), np.random.default_rng(SEED)
    speeds = [0.5 if slowed and rank == 0 else 1.0 for rank in range(ranks)]
    steps = (
        drawn.lognormal(np.log(MEDIAN), TAIL, (STEPS, ranks * EACH)).clip(16, longest).astype(int).tolist()
    )
    bests = [max(sum(map(cost, lengths)) / sum(speeds), cost(max(lengths))) for lengths in steps]
    for way, share in ways(cost, speeds):
        taken = [
            max(
                sum(cost(lengths[place]) for place in own) / speed
                for own, speed in zip(share(lengths, ranks), speeds, strict=True)
            )
            for lengths in steps
        ]
        over = [one / best for one, best in zip(taken, bests, strict=True)]
        yield Dealt(ranks, longest, slowed, way, mean(bests), mean(taken) / mean(bests), max(over))


def markdown(source: Origin, found: Sequence[Dealt]) -> str:
    def cells(one: Dealt) -> Sequence[str]:
        slowed = "one at half its speed" if one.slowed else "alike"
        figures = (f"{each:.2f}" for each in (one.best, one.times, one.worst))
        return str(one.ranks), f"{one.longest:,}", slowed, one.way, *figures

    heads = "ranks", "longest", "which are", "dealt by", "best s", "x", "worst x"
    body = table(heads, map(cells, found), (2, 3))
    return page(
        "Balance: step times by how samples are dealt", source, ["simulated, not measured"], ABOUT, body
    )


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Step times by how samples are dealt, simulated.")
    parser.add_argument("--out", type=Path, help="directory for the JSON and Markdown; default: only print")
    given = parser.parse_args(words)
    source = origin(["python", "-m", "benchmarks.layouts.balance", *words], {"torch": torch.__version__})
    every = product((8, 64), LONGEST, (False, True))
    found = [one for ranks, longest, slowed in every for one in simulated(ranks, longest, slowed)]
    publish(
        given.out,
        "layouts-balance",
        source,
        markdown(source, found),
        {"dealt": [asdict(one) for one in found]},
    )


if __name__ == "__main__":
    main(sys.argv[1:])
