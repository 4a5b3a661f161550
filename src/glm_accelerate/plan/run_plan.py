"""What follows from a config on this machine: every derived value, with its reason. Planner, trainer and
dry run all read this one object; it is never changed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from glm_accelerate.memory.job import Estimate, Item

LEAST_MICRO = 64  # tokens: what a config may say, and a multiple of which passes are
UNSEEN = ("context", "fragmentation", "writer", "evaluator")  # no tensors, or another process's


@dataclass(frozen=True, slots=True)
class Reason:
    """One derived value as a person reads it, and why it is so."""

    name: str
    value: str
    why: str


@dataclass(frozen=True, slots=True)
class Memory(Estimate):
    """What a device needs at its most, by the estimate, and what may be used of it."""

    needed: int  # bytes of the device; on a CPU of the host, whose memory that is
    room: int  # bytes that may be used
    room_why: str

    @property
    def fits(self) -> bool:
        return self.needed <= self.room

    def watched(self, device: str) -> int:
        """What `Device.peak` should show at the most: tensors on a device, all of this process on a CPU."""
        where = ("device", "host") if device == "cpu" else ("device",)
        return sum(item.bytes for item in self.items if item.where in where and item.what not in UNSEEN)

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> "Memory":
        named: dict[str, Any] = {**fields, "items": tuple(Item(**item) for item in fields["items"])}
        return Memory(**named)


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
    evaluate_samples: int  # at the most
    evaluate_where: str  # beside, inline or external
    evaluate_device: str  # of an evaluator beside
    evaluate_threads: int  # ... on a CPU, at the most
    compile: bool  # operators between matrix products
    reasons: tuple[Reason, ...]
    offload: tuple[str, ...] = ()  # of activations, optimizer, weights
    fuse_update: bool = False
    tensor: int = 1  # ranks that share every product, and have other key heads
    query: int = 1  # ... the same key heads, and other queries of them
    context: int = 1  # ranks that share a document that is longer than a pass
    stages: tuple[int, ...] = ()  # how many layers each stage of a pipeline has
    layer_costs: tuple[float, ...] = ()  # by which stages were cut: each layer's, and the head's
    memory: Memory | None = None
    evaluate_first: int = 0  # ... at first, where a budget pays for no more
    evaluate_seconds: float = 0.0  # that the largest evaluation is expected to take, where it is not inline
    evaluate_bytes: int = 0  # that an evaluator is expected to need of a spare device
    spare_bytes: int = 0  # left over where blocks recompute only to fit: as much need not be recomputed

    @property
    def divided(self) -> bool:
        """Whether no rank has the whole model."""
        return self.shards * self.tensor * self.query > 1 or bool(self.stages)

    @property
    def sparing(self) -> str:
        """What is typed to go on with less memory and the same numbers, after a run has run out of it."""
        if not self.recompute or self.spare_bytes:
            return "memory.recompute=blocks"
        if self.micro_tokens > LEAST_MICRO:
            half = self.micro_tokens // 2 // LEAST_MICRO * LEAST_MICRO
            return f"train.micro_tokens={max(LEAST_MICRO, half)}"
        return "memory.offload=[activations]"

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> "RunPlan":
        """What `asdict` gave."""
        named: dict[str, Any] = {
            **fields,
            "reasons": tuple(Reason(**reason) for reason in fields["reasons"]),
            "offload": tuple(fields["offload"]),
            "stages": tuple(fields.get("stages", ())),
            "layer_costs": tuple(fields.get("layer_costs", ())),
            "memory": fields["memory"] and Memory.from_json(fields["memory"]),
        }
        return RunPlan(**named)
