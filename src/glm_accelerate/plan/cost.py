"""How long a run takes: its operations over what the device does of them, and what has to travel.

What the device does is assumed unless `bench step` measured it; how one setting compares with another is
worth more than how long either takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from glm_accelerate.kernels.choose import Form
from glm_accelerate.memory.job import Job
from glm_accelerate.memory.weights import PACKED, sent_size, weights_of
from glm_accelerate.models.shapes import shapes_of
from glm_accelerate.models.sizes import Sizes
from glm_accelerate.plan.hardware import Hardware, known
from glm_accelerate.plan.schedule import LayerCosts, piped_seconds

UTILISED = 0.4  # of a data sheet's products, which training commonly reaches
NARROW = 0.5  # of bfloat16's speed, at best, where products are in float32 (TF32) instead
CORE_TILES = 3e11  # a second: about what training reached on a core with bfloat16 tiles
CORE_BFLOAT16 = 1.3e11  # ... on one that multiplies bfloat16 in vectors
CORE_NATIVE = 2e11  # ... by our operators in C++
CORE_PLAIN = 5e10  # ... and on one that widens it
CPU_BANDWIDTH = 2e10  # bytes a second, of a desktop's memory
LINK = 2e10  # bytes a second between device and host, or between devices: PCIe 4.0 x16 in practice
GLOO = 5e8  # bytes a second between processes of one host, as gloo brings them
STARTED = 2e-4  # seconds that a block's kernels take to start, forward and backward
STARTED_CPU = 5e-3  # ... what a pass takes for a block on a CPU however few its tokens, where not measured
FIRST_CPU = 1.5  # ... and what the first pass takes more than others
# Bytes a weight.
KEPT = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "fp8": 1.0, "nf4": 0.52}
UNPACKED = 4.5  # bytes that are read and written to unpack a weight
MOVED = {"adamw": 32, "adamw8bit": 20, "adafactor": 16}  # bytes that an update reads and writes for a weight


@dataclass(frozen=True, slots=True)
class Work:
    """All that a run learns from, whatever its settings."""

    tokens: float
    pairs: float  # of tokens, one of which sees the other
    targets: float
    steps: int


@dataclass(frozen=True, slots=True)
class Speed:
    """What one device does in a second, and what it takes besides."""

    products: float  # a second, as trained; in blocks, where the head was measured by itself
    bandwidth: float
    why: str
    first: float = 0.0  # seconds that the first step takes more, for what it compiles
    started: float = 0.0  # seconds that a pass takes for a block however few tokens it has
    head: float | None = None  # products a second of the head and its loss; None: as in blocks

    def shared(self, part: float) -> "Speed":
        """The speed of a process that has such a part of the time of its cores."""
        head = None if self.head is None else self.head * part
        return replace(
            self,
            products=self.products * part,
            head=head,
            first=self.first / part,
            started=self.started / part,
        )


def speed_of(hardware: Hardware, compute: str, form: Form = "eager") -> Speed | None:
    """What is assumed of a device; None where nothing is known of it."""
    if hardware.device == "cpu":
        each, threads = core_speed(hardware, compute), hardware.threads or hardware.cores
        if form == "native" and each == CORE_BFLOAT16:
            each = CORE_NATIVE
        why = f"{threads} thread{'s' if threads > 1 else ''} at {each / 1e12:g} TFLOP/s, assumed"
        return Speed(threads * each, CPU_BANDWIDTH, why, FIRST_CPU, STARTED_CPU)
    device = known(hardware.name)
    if device is None or device.products is None or device.bandwidth is None:
        return None
    products = device.products * UTILISED * (NARROW if compute == "float32" else 1)
    sheet = f"{device.products / 1e12:g} TFLOP/s{'' if device.sure else ' (assumed)'}"
    return Speed(products, device.bandwidth, f"{UTILISED:.0%} of {sheet}, assumed")


def core_speed(hardware: Hardware, compute: str) -> float:
    """Products a second of one core: as measured in training, else as assumed."""
    if hardware.core_products:
        return hardware.core_products
    if not hardware.bf16 or compute == "float32":
        return CORE_PLAIN
    return CORE_TILES if hardware.tiles else CORE_BFLOAT16


def run_seconds(job: Job, work: Work, speed: Speed, padding: float = 1.0) -> float:
    """The time of all steps, without evaluation and saving."""
    positions = work.tokens * padding
    sizes, again = job.sizes, 0.0 if job.recompute == "off" else 1.0  # the blocks' forward pass, once more
    block = shapes_of(sizes).multiplied
    attended = 2 * sizes.heads * sizes.head_width * (work.pairs * padding)
    repeated = 2.0 * (block * positions + sizes.layers * attended) * again
    blocks = run_flops(job, replace(work, targets=0.0), padding)
    head = (run_flops(job, work, padding) - blocks) / (speed.head or speed.products)
    computing = ((blocks + repeated) / speed.products + head) / job.ranks
    passes = max(float(work.steps), positions / job.pass_tokens / job.ranks)
    started = speed.started if job.device == "cpu" else STARTED
    computing += passes * sizes.layers * started * (1 + again / 3)
    if job.base in PACKED:
        computing += passes * block * UNPACKED / speed.bandwidth * (2 + again)
    link = GLOO if job.device == "cpu" else LINK
    moved, summed = passes * _travels(job, block, again), work.steps * _sums(job)
    computing += passes * _products_summed(job, again) / link
    updating = work.steps * _update_seconds(job, speed)
    if job.stages:
        each = layer_costs(job, work, speed).of_stages(job.stages)
        edge = job.pass_tokens * sizes.width * KEPT[job.compute] / link
        count, share = round(passes / work.steps), computing / passes / sum(each)
        computing = work.steps * piped_seconds([one * share for one in each], count, edge)
        moved, summed, updating = (whole / len(job.stages) for whole in (moved, summed, updating))
    if job.device == "cpu":  # processors that carry bytes do not compute
        return computing + (moved + summed) / link + updating
    return max(computing, (moved + summed) / link) + updating


def layer_costs(job: Job, work: Work, speed: Speed) -> LayerCosts:
    """What each layer computes, and the head with its loss."""
    blocks = run_flops(job, replace(work, targets=0.0))
    head = (run_flops(job, work) - blocks) / (speed.head or speed.products)
    deep = _deep(job.sizes, Trained(job.method, job.last))
    shares = [1.0] * (job.sizes.layers - deep) + [3.0] * deep  # frozen ones before all that train: forward
    each = blocks / speed.products / sum(shares)
    return LayerCosts(tuple(each * share for share in shares), last=head)


def trained_weights(job: Job) -> int:
    """How many weights move."""
    return sum(weight.rows * weight.columns for weight in weights_of(job) if weight.trains)


def run_flops(job: Job, work: Work, padding: float = 1.0) -> float:
    """What the mathematics of a run needs. `padding`: positions that are computed for each token."""
    prefix = job.prefix_tokens if job.method == "prefix" else 0
    trained = Trained(job.method, job.last, prefix)
    attended = (work.pairs + work.tokens * prefix) * padding
    products = product_flops(job.sizes, trained, work.tokens * padding, work.targets)
    return products + attended_flops(job.sizes, trained, attended)


def _travels(job: Job, block: int, again: float) -> float:
    """Bytes of a pass between the device and others, beside the computing."""
    moved = 0.0
    if "activations" in job.offload:
        sizes = job.sizes
        query, key = sizes.heads * sizes.head_width, sizes.kv_heads * sizes.head_width
        inside = 4 * sizes.width + 2 * query + 2 * key + 3 * sizes.mlp_width
        moved += 2 * 2 * job.pass_tokens * sizes.layers * (again * sizes.width + (1 - again) * inside)
    if "weights" in job.offload:
        moved += block * KEPT[job.base] * (2 + again)
    if job.shards > 1:
        times = 2 + again if job.zero == 3 else 1 / job.passes
        size = sent_size(job) if job.method == "full" else KEPT[job.base]
        moved += shapes_of(job.sizes).parameters * size * times * (1 - 1 / job.shards)
    return moved


def _products_summed(job: Job, again: float) -> float:
    """Bytes of a pass that ranks wait for, where they share every product: two sums a block in each pass."""
    travels = 2 * (1 - 1 / job.tensor) * job.pass_tokens * job.sizes.width * KEPT[job.compute]
    return travels * job.sizes.layers * (4 + 2 * again)


def _sums(job: Job) -> float:
    """Bytes of gradients that a rank receives in a step: of its part, or all of them where it is whole."""
    other = 1 - 1 / job.ranks
    return trained_weights(job) * 4 * other * (1 if job.shards > 1 else 2)


def _update_seconds(job: Job, speed: Speed) -> float:
    own = trained_weights(job) / job.shards
    if "optimizer" in job.offload:  # gradients go, new weights come back, and the host computes
        return own * (8 / LINK + MOVED[job.optimizer] / CPU_BANDWIDTH)
    return own * MOVED[job.optimizer] / speed.bandwidth


@dataclass(frozen=True, slots=True)
class Trained:
    """What of a model is trained, as far as it changes what a backward pass has to compute."""

    method: str = "full"  # lora, full, freeze or prefix
    layers: int = 0  # freeze: how many of the last
    prefix_tokens: int = 0  # prefix: how many stand before each document


def step_flops(sizes: Sizes, trained: Trained, lengths: Sequence[int], targets: int) -> float:
    """Floating-point operations of a step on documents of these lengths: what the mathematics needs, without
    padding, recomputation or the masked half of attention.
    """
    tokens = int(np.sum(lengths, dtype=np.int64))
    attended = attended_flops(sizes, trained, pairs(lengths, trained.prefix_tokens))
    return product_flops(sizes, trained, tokens, targets) + attended


def product_flops(sizes: Sizes, trained: Trained, tokens: float, targets: float) -> float:
    """2N a token forward, 2N for the gradient of the input, 2N for that of weights that train: 4N for LoRA,
    6N for full. N are the linear layers of the blocks, and for rows with a target the head. What an adapter
    itself multiplies is below a hundredth and left out.
    """
    shapes, first = shapes_of(sizes), sizes.layers - _deep(sizes, trained)
    deep = sum(shapes.of_block(block) for block in range(first, sizes.layers))
    products = shapes.multiplied + (2 if trained.method in ("full", "freeze") else 1) * deep
    head = 3 if trained.method == "full" else 2
    return 2.0 * (products * tokens + sizes.vocabulary * sizes.width * targets * head)


def attended_flops(sizes: Sizes, trained: Trained, attended: float) -> float:
    """Two products forward and four backward for so many pairs of tokens."""
    products = 2 * sizes.layers + 4 * _deep(sizes, trained)
    return 2.0 * sizes.heads * sizes.head_width * attended * products


def pairs(lengths: Sequence[int] | NDArray[np.int32], prefix_tokens: int = 0) -> float:
    """How many tokens see how many, over all documents."""
    each = np.asarray(lengths, dtype=np.float64)
    return float((each * (each + 1) / 2 + each * prefix_tokens).sum())


def _deep(sizes: Sizes, trained: Trained) -> int:
    """Through how many layers the gradient goes."""
    return min(trained.layers, sizes.layers) if trained.method == "freeze" else sizes.layers
