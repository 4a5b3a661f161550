"""From raw times and bytes of the runs to the few figures that are reported: medians, and ratios of pairs.

A ratio is taken between the two runs of one repeat, which stood next to each other in time, and then the
median of those ratios: drift of the machine cancels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.race.job import Result


@dataclass(frozen=True)
class Pair:
    """One repeat: both sides, one after the other, on the same samples in the same steps."""

    stock: Result
    ours: Result
    stock_loss: float  # held out, by the judge
    ours_loss: float

    def __post_init__(self) -> None:
        same = self.stock.tokens == self.ours.tokens and self.stock.targets == self.ours.targets
        assert same, "the sides did not train the same samples in the same steps"


@dataclass(frozen=True)
class Row:
    """One line of the report. `ratios` holds ours / stock of each pair."""

    name: str
    unit: str
    stock: float
    ours: float
    ratios: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return median(self.ratios)


def rows(pairs: Sequence[Pair], warmup: int, weights: int) -> list[Row]:
    """`weights` is the size of the model's file: the frozen weights, which are no side's merit or fault."""

    def row(name: str, unit: str, stock: list[float], ours: list[float]) -> Row:
        ratios = tuple(b / a for a, b in zip(stock, ours, strict=True))
        return Row(name, unit, median(stock), median(ours), ratios)

    def both(name: str, unit: str, of: "Figure") -> Row:
        return row(name, unit, [of(p.stock) for p in pairs], [of(p.ours) for p in pairs])

    return [
        both("speed by wall clock", "tokens/s", Speed("wall_seconds", warmup)),
        both("speed by processor time", "tokens/s", Speed("cpu_seconds", warmup)),
        both("the same, warm-up steps included: wall", "tokens/s", Speed("wall_seconds", 0)),
        both("the same, warm-up steps included: processor", "tokens/s", Speed("cpu_seconds", 0)),
        both("first step, in which ours may compile", "s", First()),
        both("peak memory", "MB", Peak(above=0)),
        both("peak memory above libraries and weights", "MB", Peak(above=weights)),
        both("positions that hold a token", "%", Useful()),
        row("held-out loss", "", [p.stock_loss for p in pairs], [p.ours_loss for p in pairs]),
    ]


@dataclass(frozen=True)
class Speed:
    """Unpadded tokens a second, from the first step after the warm-up."""

    clock: str
    skip: int

    def __call__(self, result: Result) -> float:
        seconds = result.wall_seconds if self.clock == "wall_seconds" else result.cpu_seconds
        return sum(result.tokens[self.skip :]) / sum(seconds[self.skip :])


@dataclass(frozen=True)
class First:
    """Seconds of the first step by wall clock."""

    def __call__(self, result: Result) -> float:
        return result.wall_seconds[0]


@dataclass(frozen=True)
class Peak:
    """Megabytes. With `above`: less what was resident before loading, and less the weights themselves."""

    above: int

    def __call__(self, result: Result) -> float:
        base = result.memory_before + self.above if self.above else 0
        return (result.memory_peak - base) / 1e6


@dataclass(frozen=True)
class Useful:
    """Share of the computed positions that hold a token."""

    def __call__(self, result: Result) -> float:
        return 100 * sum(result.tokens) / sum(result.computed)


Figure = Speed | First | Peak | Useful
