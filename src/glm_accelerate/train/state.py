"""Every item of resume state besides tensors. What is not listed here is a function of the config.

The order of samples and the randomness of step k follow from the seed and k, so neither is stored.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from glm_accelerate.data.types import Step


@dataclass(slots=True)
class Progress:
    """Where a run stands. The one mutable object of the training loop."""

    position: int = 0  # steps whose samples are consumed
    applied: int = 0  # steps that moved the weights: what the schedule counts
    bad_in_a_row: int = 0  # steps in a row whose gradients were not finite
    bad: int = 0  # all of them
    tokens: int = 0  # unpadded, over the whole run
    losses: dict[int, float] = field(default_factory=dict)  # held-out loss by step

    def record(self, step: Step, applied: bool) -> None:
        """A step is over. One that was not applied uses up its samples but does not advance the schedule."""
        self.position = step.number
        self.tokens += step.tokens
        self.applied += applied
        self.bad += not applied
        self.bad_in_a_row = 0 if applied else self.bad_in_a_row + 1

    def to_json(self) -> dict[str, Any]:
        """For state.json."""
        return asdict(self)

    @staticmethod
    def from_json(said: dict[str, Any]) -> "Progress":
        """What `to_json` gave."""
        losses = {int(step): loss for step, loss in said["losses"].items()}
        rest = {key: int(value) for key, value in said.items() if key != "losses"}
        return Progress(**rest, losses=losses)
