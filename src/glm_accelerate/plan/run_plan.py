"""What follows from a config on this machine: every derived value, with its reason. Planner, trainer and
dry run all read this one object; it is never changed.
"""

from dataclasses import dataclass


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
    dtype: str  # of frozen weights
    compute: str  # of matrix products
    steps: int
    steps_per_epoch: int
    step_samples: int | None
    step_tokens: int | None
    micro_tokens: int
    recompute: bool
    warmup_steps: int
    checkpoint_every: int
    evaluate_every: int  # 0: never
    evaluate_samples: int
    reasons: tuple[Reason, ...]
