"""When to save: pure functions from what was measured to a decision and its reason.

A save costs the seconds for which training waits; a failure costs the work since the last save. Young's and
Daly's interval, sqrt(2 C M) - C, makes their sum least. Bounds keep it sane where the figures are not.
"""

import math
from dataclasses import dataclass
from typing import Literal

from glm_accelerate.runtime.words import duration

Event = Literal["signal", "end", "new best"]

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


@dataclass(frozen=True, slots=True)
class Fixed:
    """Every so many steps."""

    steps: int


@dataclass(frozen=True, slots=True)
class Adaptive:
    """As often as pays."""

    between_failures: float | None = None  # seconds, as declared; None: learnt from the run itself
    overhead: float = 0.01  # share of time that saves may take while failures are only guessed
    longest_loss: float = 1800.0  # seconds of work that a failure may cost


Policy = Fixed | Adaptive


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to save now, and why or why not."""

    save: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Interval:
    """How much training lies between two saves."""

    seconds: float
    reason: str


def decide(policy: Policy, measured: Measured, event: Event | None = None) -> Decision:
    """After each step."""
    if event is not None:
        return Decision(True, event)
    if isinstance(policy, Fixed):
        return Decision(measured.step % policy.steps == 0, f"every {policy.steps} steps")
    wanted = interval(policy, measured)
    due = measured.since_save + measured.step_seconds / 2 >= wanted.seconds  # the nearest step
    said = f"{duration(measured.since_save)} since the last save; one every {duration(wanted.seconds)}"
    return Decision(due, f"{said}: {wanted.reason}")


def interval(policy: Adaptive, measured: Measured) -> Interval:
    """Young's and Daly's interval within its bounds. The later bound wins over the earlier ones."""
    blocked, write = costs(measured)
    between, source = between_failures(policy, measured)
    best = max(0.0, math.sqrt(2 * blocked * between) - blocked)
    least = blocked * (1 - policy.overhead) / policy.overhead
    # What training has done while a save was written is lost with the save before it.
    most = policy.longest_loss - write - measured.step_seconds
    wanted = Interval(
        best, f"a save stops training for {duration(blocked)}, a failure every {duration(between)} {source}"
    )
    if wanted.seconds < least and source == "(guessed)":
        wanted = Interval(least, f"saves of {duration(blocked)} may take {policy.overhead:.1%} of the time")
    if wanted.seconds > most:
        wanted = Interval(most, f"a failure may cost {duration(policy.longest_loss)} of work")
    if wanted.seconds < write:
        wanted = Interval(write, f"a save takes {duration(write)} to write")
    return wanted


def costs(measured: Measured) -> tuple[float, float]:
    """Seconds that a save stops training, and that it takes in all; by its size until one was measured."""
    blocked, write = measured.blocked_seconds, measured.write_seconds
    if blocked is None:
        blocked = measured.state_bytes / COPY_SPEED
    if write is None:
        write = measured.state_bytes / WRITE_SPEED
    return blocked, max(blocked, write)


def between_failures(policy: Adaptive, measured: Measured) -> tuple[float, str]:
    """Seconds between failures, and where the figure comes from."""
    if policy.between_failures is not None:
        return policy.between_failures, "(declared)"
    seen = (GUESS_WEIGHT * GUESS + measured.wall_seconds) / (GUESS_WEIGHT + measured.failures)
    return (seen, f"({measured.failures} seen)") if measured.failures else (seen, "(guessed)")
