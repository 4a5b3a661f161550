"""What a run's memory depends on, and what a prediction of it says: the joint between plan and model."""

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal

from glm_accelerate.kernels.choose import Form
from glm_accelerate.models.sizes import Sizes

Where = Literal["device", "host", "disk"]
ASSUMED = "assumed"  # how the reason of an item begins that could not be measured


@dataclass(frozen=True, slots=True)
class Job:
    """One rank's largest step. Layers are called as ours: query_key_value or q_proj, k_proj, v_proj; o_proj,
    gate_up_proj, down_proj.
    """

    sizes: Sizes
    method: str = "lora"  # lora | full | freeze | prefix
    rank: int = 8  # lora
    adapted: tuple[str, ...] | None = None  # lora: which layers of a block; None: all
    dropout: float = 0.1  # lora, prefix
    last: int = 2  # freeze: how many blocks train
    prefix_tokens: int = 128  # prefix
    prefix_width: int = 0  # ... numbers of each, for all layers and heads of the model; 0: as `sizes` say
    base: str = "bfloat16"  # of frozen weights: a dtype, or nf4, int8, fp8 for layers inside blocks
    rest: str = "bfloat16"  # of frozen weights outside them, where `base` is packed
    compute: str = "bfloat16"
    optimizer: str = "adamw"  # adamw | adamw8bit | adafactor
    clips: bool = True  # gradients are held down by their norm
    pass_tokens: int = 2048  # of the largest forward pass
    longest: int = 2048  # document in it
    documents: int = 0  # in it; 0: as many as the longest is contained
    learnt: int = 2048  # targets in it
    passes: int = 1  # of a step, on this rank, as far as memory depends on their number
    recompute: Literal["off", "blocks"] = "off"
    offload: frozenset[str] = frozenset()  # of activations, optimizer, weights
    fuse_update: bool = False  # a weight is updated as soon as its gradient is there
    ranks: int = 1  # that take other samples
    tensor: int = 1  # ... times so many that share every product: `sizes` are of one of these
    context: int = 1  # of the ranks that take other samples, how many share a long document
    gathered: int = 0  # keys of such documents, in the pass with the most, besides those of its own tokens
    shards: int = 1  # ranks that share one copy of weights, gradients and moments
    zero: int = 3  # what they divide between passes: 1 moments, 2 gradients too, 3 weights too
    stages: tuple[int, ...] = ()  # layers of each stage of a pipeline; (): all are on each of these ranks
    embeds: bool = True  # whether the embedding is here,
    heads: bool = True  # ... norm and head,
    held: int = 1  # ... and so many passes between forward and backward, at the most
    device: str = "cpu"
    form: Form = "eager"
    process: int = 0  # bytes that a process takes besides tensors, as measured; 0: what is assumed
    measured_with: int = 0  # bytes of tensors when that was measured
    saves: bool = True  # checkpoints are written behind training
    kept_saves: int = 4  # checkpoints on disk
    snapshots: bool = False  # weights are handed to an evaluator
    evaluator: bool = False  # ... that runs on this machine's CPU

    @property
    def processes(self) -> int:
        """All ranks."""
        return self.ranks * self.tensor * max(1, len(self.stages))

    def of_stages(self) -> list["Job"]:
        """Those of the ranks of each stage; itself, where there are none."""
        bounds = pairwise(accumulate(self.stages, initial=0))
        return [self.of_stage(stage, len(self.stages), *each) for stage, each in enumerate(bounds)] or [self]

    def of_stage(self, stage: int, count: int, start: int, stop: int) -> "Job":
        """That of the ranks of one of `count` stages, which has these layers."""
        return replace(
            self,
            sizes=replace(self.sizes, layers=stop - start),
            last=min(max(0, self.last - (self.sizes.layers - stop)), stop - start),
            stages=(),
            embeds=stage == 0,
            heads=stage == count - 1,
            held=in_flight(stage, count, self.passes),
        )


def in_flight(stage: int, stages: int, passes: int) -> int:
    """How many passes a stage of a pipeline has been through forward and not yet backward, at the most."""
    return max(1, min(passes, stages - stage))


def matter(stages: int) -> int:
    """On how many passes of a step memory depends: the second finds gradients; the first stage then has as
    many passes between forward and backward as there are stages.
    """
    return max(2, stages + 1)


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the table."""

    what: str
    bytes: int
    why: str
    where: Where = "device"


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is alive at the moment of the most (`phase`), and what host and disk take besides."""

    items: tuple[Item, ...]
    phase: str

    @property
    def peak(self) -> int:
        """Bytes of one device."""
        return self.total("device")

    @property
    def host(self) -> int:
        """Bytes of the host that one rank takes besides; on a CPU both are the host's."""
        return self.total("host")

    @property
    def spared(self) -> int:
        """Bytes of the host that a save does without where memory is short (training/saver.py)."""
        return sum(item.bytes for item in self.items if item.what in ("staging", "writer"))

    @property
    def allocated(self) -> int:
        """Bytes of one device that torch's allocator counts: all that is not assumed."""
        device = (item for item in self.items if item.where == "device")
        return sum(item.bytes for item in device if not item.why.startswith(ASSUMED))

    def total(self, where: Where) -> int:
        """The sum of its items there."""
        return sum(item.bytes for item in self.items if item.where == where)
