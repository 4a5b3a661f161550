"""The loss scale of float16: the loss is multiplied, so that small gradients do not become zero; gradients
are divided again where they are clipped. Two numbers are all of its state.

    (loss * scale.value).backward();  norm = mover.norm(scale.value)
    scale = rescale(scale, isfinite(norm), patience=1000)
"""

from dataclasses import dataclass

FLOOR = 1.0  # below it float16 cannot hold the true gradients: the run is ill, not the scale
CEILING = 2.0**24


@dataclass(frozen=True, slots=True)
class Scale:
    """By what the loss is multiplied, and for how many steps in a row that was right."""

    value: float
    good: int = 0

    @property
    def lowest(self) -> bool:
        """Whether an overflow from here on is a bad step."""
        return self.value <= FLOOR


def rescale(scale: Scale, finite: bool, *, patience: int) -> Scale:
    """The scale after one more step: halved at an overflow, doubled after `patience` steps without one."""
    if not finite:
        return Scale(max(FLOOR, scale.value / 2))
    if scale.good + 1 < patience:
        return Scale(scale.value, scale.good + 1)
    return Scale(min(CEILING, 2 * scale.value))
