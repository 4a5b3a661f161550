"""Whether the training loss has jumped. What is saved from then on is suspect, and the newest checkpoint from
before stays: nobody is rolled back unasked, and nothing to go back to is lost.
"""

from dataclasses import dataclass

FACTOR = 3.0  # times the usual loss; a model that knows nothing any more has only 5 to 10 times that
LEAST = 0.2  # where the usual loss is less, one hard sample is many times as much
MEMORY = 0.9  # share of the usual loss that the next one leaves
CALM = 10  # steps in a row after which it is back


@dataclass(frozen=True, slots=True)
class Level:
    """What the losses so far come to."""

    usual: float | None = None  # a running mean, without the high ones
    jumped: int | None = None  # the step at which it went high, until it is back
    calm: int = 0  # steps in a row that were not high, since then


def follow(level: Level, step: int, loss: float) -> Level:
    """The level after one more step."""
    if level.usual is None:
        return Level(loss)
    if loss > FACTOR * max(level.usual, LEAST):
        return Level(level.usual, step if level.jumped is None else level.jumped)
    if level.jumped is not None and level.calm + 1 < CALM:
        return Level(level.usual, level.jumped, level.calm + 1)
    return Level(MEMORY * level.usual + (1 - MEMORY) * loss)
