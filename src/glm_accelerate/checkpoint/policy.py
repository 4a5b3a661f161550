"""When to save: pure functions from the config and what was measured.

A save costs the seconds for which training waits; a failure costs the work since the last save. Young's and
Daly's interval, sqrt(2 C M) - C, makes their sum least. Bounds keep it sane where the figures are not.
"""

import math
from dataclasses import dataclass

from glm_accelerate.config.schema import CheckpointSection

COPY_SPEED = 2e9  # bytes/s, careful: until the first save is measured
WRITE_SPEED = 100e6
GUESS = 86_400.0  # seconds between failures before one was seen
GUESS_WEIGHT = 0.1  # of a failure: the first real one outweighs the guess


@dataclass(frozen=True, slots=True)
class Measured:
    """The run so far, all in seconds and counts. Wall time and failures are of all attempts together."""

    step: int
    since_save: float  # training since the last save began, or since the start
    step_seconds: float
    state_bytes: int
    blocked_seconds: float | None = None  # of the last save; None: there was none yet
    write_seconds: float | None = None  # from the last save's beginning until it was published
    failures: int = 0  # attempts that ended neither by themselves nor by a signal
    wall_seconds: float = 0.0


def is_due(section: CheckpointSection, measured: Measured) -> bool:
    """Whether to save after this step."""
    if section.every != "auto":
        return measured.step % section.every == 0
    nearest_step = measured.since_save + measured.step_seconds / 2
    return nearest_step >= interval(section, measured)


def interval(section: CheckpointSection, measured: Measured) -> float:
    """Seconds of training between two saves, within bounds, of which the last one wins."""
    blocked, write = costs(measured)
    between = between_failures(section, measured)
    wanted = max(0.0, math.sqrt(2 * blocked * between) - blocked)
    if section.between_failures == "auto" and not measured.failures:  # only guessed
        wanted = max(wanted, blocked * (1 - section.overhead) / section.overhead)
    # What training has done while a save was written is lost with the save before it.
    wanted = min(wanted, section.longest_loss - write - measured.step_seconds)
    return max(wanted, write)


def costs(measured: Measured) -> tuple[float, float]:
    """Seconds that a save stops training, and that it takes in all; by its size until one was measured."""
    blocked, write = measured.blocked_seconds, measured.write_seconds
    if blocked is None:
        blocked = measured.state_bytes / COPY_SPEED
    if write is None:
        write = measured.state_bytes / WRITE_SPEED
    return blocked, max(blocked, write)


def between_failures(section: CheckpointSection, measured: Measured) -> float:
    """Seconds between failures: as declared, or learnt from the run, which begins with a guess."""
    if section.between_failures != "auto":
        return section.between_failures
    return (GUESS_WEIGHT * GUESS + measured.wall_seconds) / (GUESS_WEIGHT + measured.failures)
