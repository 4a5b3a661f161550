"""What follows from a config on this machine: every derived value, with its reason. Planner, trainer and
dry run all read this one object; it is never changed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Reason:
    """One derived value as a person reads it, and why it is so."""

    name: str
    value: str
    why: str


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Everything the trainer needs besides the config itself."""

    family: str
    template: str
    device: str
    ranks: int
    shards: int  # ranks that share one copy of the state; 1: each has its own
    dtype: str  # of frozen weights
    compute: str  # of matrix products
    steps: int
    steps_per_epoch: int
    step_samples: int | None
    step_tokens: int | None
    micro_tokens: int
    recompute: bool
    warmup_steps: int
    codec: str
    evaluate_every: int  # 0: never
    evaluate_samples: int
    compile: bool  # operators between matrix products
    reasons: tuple[Reason, ...]

    @staticmethod
    def from_json(said: Mapping[str, Any]) -> "RunPlan":
        """What `asdict` gave."""
        named: dict[str, Any] = {**said, "reasons": tuple(Reason(**reason) for reason in said["reasons"])}
        return RunPlan(**named)
