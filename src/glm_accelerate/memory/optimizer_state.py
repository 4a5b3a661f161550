"""What an optimizer keeps of each weight that trains, and what an update needs besides, as in optim/."""

from collections.abc import Iterator
from itertools import pairwise

from glm_accelerate.memory.job import Job
from glm_accelerate.memory.weights import MATRICES, WIDE, Weight, weights_of

LEAST_PACKED, BLOCK = 4096, 256  # of adamw8bit: numbers of a moment that is packed, and of one scale
BUCKET = 32 * 2**20  # bytes of gradients that ranks sum at once (parallel/reduce.py)


def state_bytes(job: Job) -> int:
    """Of all weights that train: this rank's part."""
    return sum(moments(job.optimizer, weight, job.shards) for weight in trained(job))


def trained(job: Job) -> Iterator[Weight]:
    return (weight for weight in weights_of(job) if weight.trains)


def moments(optimizer: str, weight: Weight, shards: int) -> int:
    """Bytes of state of one weight, its count of steps included."""
    numbers = weight.part(shards)
    if optimizer == "adafactor":
        rows = -(-weight.rows // shards)
        return WIDE * (numbers if weight.columns == 1 else rows + weight.columns) + WIDE
    if optimizer == "adamw8bit" and numbers >= LEAST_PACKED and numbers % BLOCK == 0:
        return 2 * (numbers + numbers // BLOCK * WIDE + 256 * WIDE) + WIDE  # codes, scales, a table of levels
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
    """Gradients that ranks sum at once, where each holds the whole model."""
    if job.ranks == 1 or job.shards > 1:
        return 0
    most = size = 0
    for weight in trained(job):
        if size >= BUCKET:
            size = 0
        size += weight.part(1) * WIDE
        most = max(most, size)
    return most


def copied(job: Job) -> bool:
    """Whether every trained matrix is kept in the dtype of activations, too (optim/one_pass.py)."""
    own = job.form == "native" and job.optimizer == "adamw" and job.shards == 1
    return own and job.method in ("full", "freeze")


def copy_bytes(job: Job) -> int:
    """Of those copies, in bfloat16; an embedding, and a head that is one, have none."""
    return 2 * sum(weight.part(1) for weight in trained(job) if weight.kind in MATRICES) * copied(job)
