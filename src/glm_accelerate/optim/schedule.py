"""The learning rate as a pure function of how many steps have been applied."""

import math


def rate(applied: int, total: int, *, schedule: str, warmup: int, decay: float, floor: float) -> float:
    """Share of the highest rate for the step after `applied` ones; 1 is the highest.

    `decay` is the share of the run in which wsd falls; `floor` is the share left at the end.
    """
    if applied < warmup:
        return (applied + 1) / warmup
    if schedule == "constant":
        return 1.0
    span = max(1, total - warmup)
    progress = min(1.0, (applied - warmup) / span)
    if schedule == "wsd":
        progress = max(0.0, (progress - (1 - decay)) / decay)
    fallen = (1 - math.cos(math.pi * progress)) / 2 if schedule == "cosine" else progress
    return 1.0 - (1.0 - floor) * fallen
