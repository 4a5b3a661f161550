"""What a model and its optimizer keep for good: which weights there are, which of them train, the bytes of
each and of its state; and what an update needs besides, as in optim/.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from glm_accelerate.kernels.quantized import BLOCK
from glm_accelerate.memory.job import Job
from glm_accelerate.models.shapes import LinearShape, shapes_of

SIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
WIDE = 4  # bytes of a weight that trains, of its gradient where that is a sum, and of a moment
LEAST_MOVED = 2**16  # bytes of a frozen weight that memory/frozen.py moves
PACKED = ("nf4", "int8", "fp8")
LEAST_PACKED, SCALED = 4096, 256  # of adamw8bit: numbers of a moment that is packed, and of one scale
BUCKET = 25 * 2**20  # bytes of gradients that ranks sum together; a larger one is summed alone, in place
BUCKETS = 2  # under way at once: the network always has work, and few gradients are there twice


@dataclass(frozen=True, slots=True)
class Layer(LinearShape):
    """A linear layer of a job. `blocks`: all that have it."""

    blocks: tuple[int, ...]
    trains: bool
    adapted: bool  # has a LoRA adapter


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter: `rows` are what ranks divide."""

    kind: str  # matrix | packed | embedding | head | adapter | small
    block: int  # -1: outside of blocks
    rows: int
    columns: int
    itemsize: int
    trains: bool
    shared: bool = False  # by several blocks

    def part(self, shards: int) -> int:
        """Numbers of the largest part."""
        return -(-self.rows // shards) * self.columns

    def bytes(self, shards: int) -> int:
        return self.part(shards) * self.itemsize


def parameter_bytes(job: Job) -> int:
    """This rank's part of all parameters, on the device."""
    every = sum(weight.bytes(job.shards) for weight in weights_of(job))
    if "weights" not in job.offload:
        return every
    away = away_bytes(job)
    return every - sum(away) + max(map(sum, pairwise([0, *away])))


def away_bytes(job: Job) -> list[int]:
    """Bytes of each block's frozen weights that live on the host; two neighbours' are here at a time."""
    away = [0] * job.sizes.layers
    for weight in weights_of(job):
        size = weight.bytes(job.shards)
        if weight.block >= 0 and not (weight.trains or weight.shared) and size >= LEAST_MOVED:
            away[weight.block] += size
    return away


def projections_of(job: Job, block: int) -> list[list[Layer]]:
    """A block's projections in the order in which they run, each of one layer or of two thin ones."""
    projections: list[list[Layer]] = []
    for each in shapes_of(job.sizes).blocks[block]:
        adapted = job.method == "lora" and (job.adapted is None or each.name in job.adapted)
        rest = each.blocks, block_trains(job, each.blocks[0]), adapted
        projections.append([Layer(one.inputs, one.outputs, one.bias, *rest) for one in each.layers])
    return projections


def block_trains(job: Job, block: int) -> bool:
    """Whether all of a block's own weights do."""
    return job.method == "full" or (job.method == "freeze" and block >= job.sizes.layers - job.last)


def prefix_width(job: Job) -> int:
    """Numbers of a prefix token: a rank has those of all layers and heads."""
    s = job.sizes
    return job.prefix_width or s.layers * 2 * s.kv_heads * s.head_width


def trained_size(job: Job) -> int:
    """Bytes of a number of the model's own weights, where they train: float32 masters may be on the host."""
    return SIZE[job.compute] if "optimizer" in job.offload and job.compute in SIZE else WIDE


def sent_size(job: Job) -> int:
    """Bytes of a number of a trained matrix as it travels between ranks that each have a part of it."""
    return min(trained_size(job), SIZE["bfloat16"]) if job.compute == "bfloat16" else trained_size(job)


def frozen_dtype(job: Job) -> str:
    """The dtype of weights that are neither trained nor packed."""
    return job.rest if job.base in PACKED else job.base


def weights_of(job: Job) -> Iterator[Weight]:
    """Every parameter of the model."""
    s, frozen = job.sizes, SIZE[frozen_dtype(job)]
    full = job.method == "full"
    outside = trained_size(job) if full else frozen
    if job.embeds or (job.heads and s.tied):
        yield Weight("embedding", -1, s.vocabulary, s.width, outside, full)
    for block in range(s.layers):
        yield from _of_block(job, block)
    if job.heads:
        yield Weight("small", -1, s.width, 1, outside, full)
    if job.heads and not s.tied:
        yield Weight("head", -1, s.vocabulary, s.width, outside, full)
    if job.method == "prefix":
        yield Weight("adapter", -1, job.prefix_tokens, prefix_width(job), WIDE, True)


def _of_block(job: Job, block: int) -> Iterator[Weight]:
    s, trains = job.sizes, block_trains(job, block)
    small = trained_size(job) if trains else SIZE[frozen_dtype(job)]
    layers = (layer for each in projections_of(job, block) for layer in each if layer.blocks[0] == block)
    for layer in layers:
        shared = len(layer.blocks) > 1
        if job.base in PACKED and not trains:
            yield from _packed(job.base, layer, block, shared)
        else:
            yield Weight("matrix", block, layer.outputs, layer.inputs, small, trains, shared)
        if layer.bias:
            yield Weight("small", block, layer.outputs, 1, small, trains)
        if layer.adapted:
            yield Weight("adapter", block, job.rank, layer.inputs, WIDE, True)
            yield Weight("adapter", block, layer.outputs, job.rank, WIDE, True)
    for _ in range(4 if s.sandwich else 2):
        yield Weight("small", block, s.width, 1, small, trains)


def _packed(kind: str, layer: Layer, block: int, shared: bool) -> Iterator[Weight]:
    """The layout of `kernels/quantized.py`: codes, scales, and for nf4 a level for each block of a row."""
    if kind == "nf4":
        blocks = -(-layer.inputs // BLOCK)
        yield Weight("packed", block, layer.outputs, blocks * BLOCK // 2, 1, False, shared)
        yield Weight("small", block, layer.outputs, 2, 4, False)
        yield Weight("small", block, layer.outputs, blocks, 1, False)
    else:
        yield Weight("packed", block, layer.outputs, layer.inputs, 1, False, shared)
        yield Weight("small", block, layer.outputs, 1, 4, False)


def state_bytes(job: Job) -> int:
    """What the optimizer keeps of all weights that train: this rank's part."""
    return sum(moments(job.optimizer, weight, job.shards) for weight in trained(job))


def trained(job: Job) -> Iterator[Weight]:
    return (weight for weight in weights_of(job) if weight.trains)


def moments(optimizer: str, weight: Weight, shards: int) -> int:
    """Bytes of state of one weight, its count of steps included."""
    numbers = weight.part(shards)
    if optimizer == "adafactor":
        rows = -(-weight.rows // shards)
        return WIDE * (numbers if weight.columns == 1 else rows + weight.columns) + WIDE
    if optimizer == "adamw8bit" and numbers >= LEAST_PACKED and numbers % SCALED == 0:
        codes, scales, levels = numbers, numbers // SCALED * WIDE, 256 * WIDE
        return 2 * (codes + scales + levels) + WIDE
    return 2 * WIDE * numbers + WIDE


def update_bytes(job: Job) -> int:
    """What the update of weights takes beside gradients and state, at its worst moment."""
    sizes = [weight.part(job.shards) * WIDE for weight in trained(job) if weight.columns > 1]
    if job.optimizer == "adafactor":
        if job.fuse_update:
            return max(sizes, default=0)
        return max(map(sum, pairwise([0, *sizes])))  # one lives until the next is there
    # Both moments of one weight, wide: measured on a CPU, where torchao's compiled update takes just that.
    return 2 * max(sizes, default=0) if job.optimizer == "adamw8bit" else 0


def reduce_bytes(job: Job) -> int:
    """Copies of gradients that travel, where each rank holds the whole model (parallel/sums.py)."""
    if job.ranks == 1 or job.shards > 1:
        return 0
    sizes = (weight.part(1) * WIDE for weight in trained(job))
    return min(BUCKETS * BUCKET, sum(size for size in sizes if size <= BUCKET))


def gathered_bytes(job: Job, weight: Weight) -> int:
    """All of a weight, gathered."""
    narrow = weight.trains and weight.kind in ("matrix", "head")
    return weight.part(1) * (sent_size(job) if narrow else weight.itemsize)


def copied(job: Job) -> bool:
    """Whether every trained matrix is kept in the dtype of activations, too (optim/one_pass.py)."""
    own = job.form == "native" and job.optimizer == "adamw" and job.shards == 1
    return own and job.method in ("full", "freeze")


def copy_bytes(job: Job) -> int:
    """Those copies, in bfloat16; an embedding, and a head that is one, have none."""
    multiplied = ("matrix", "head")
    return 2 * sum(weight.part(1) for weight in trained(job) if weight.kind in multiplied) * copied(job)
