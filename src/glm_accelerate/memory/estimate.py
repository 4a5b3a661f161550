"""The most memory that a run needs, before it runs: a step is rehearsed with bytes for tensors, and what was
alive at its worst moment is the prediction (docs/why/memory-model.md).
"""

from collections import deque
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

from glm_accelerate.memory.activations import forward_backward
from glm_accelerate.memory.host import disk_items, host_items
from glm_accelerate.memory.job import Estimate, Item, Job, Recompute, Where
from glm_accelerate.memory.offload import ROOM
from glm_accelerate.memory.operators import Operators
from glm_accelerate.memory.optimizer_state import (
    copied,
    copy_bytes,
    reduce_bytes,
    state_bytes,
    trained,
    update_bytes,
)
from glm_accelerate.memory.rehearsal import Gradient, Held, SimulatedMemory, Tape
from glm_accelerate.memory.sharding import Divided, whole_sizes
from glm_accelerate.memory.waiting import OffloadedBytes
from glm_accelerate.memory.weights import SIZE, WIDE, parameter_bytes, trained_size
from glm_accelerate.models.shapes import shapes_of
from glm_accelerate.runtime.device import device_kind

__all__ = ["Estimate", "Item", "Job", "Recompute", "Where", "estimate"]

FRAGMENTS = 0.03  # assumed: share of an allocator's memory that is free in pieces too small
HEAP = 0.01  # ... of a heap's
SEVERAL = 0.1  # ... of a heap's where a step has several passes: the second finds holes that the first left
UNSEEN = 0.07  # ... of a heap's that is more than was measured with (-3 to 18 % with eight blocks after two)


def estimate(job: Job) -> Estimate:
    """Of the rank that needs most."""
    room = SimulatedMemory()
    kept = [
        Held(room, "parameters", parameter_bytes(job)),
        Held(room, "optimizer", 0 if "optimizer" in job.offload else state_bytes(job)),
        Held(room, "copies", copy_bytes(job)),
    ]
    gradients: dict[object, Held] = {}
    moved = 0
    for _ in range(job.passes):
        moved = max(moved, _pass(job, room, gradients))
    room.phase = "update"
    room.briefly(reduce_bytes(job))
    room.briefly(update_bytes(job))
    kept.clear()
    items = _device_items(job, room)
    return Estimate((*items, *host_items(job, moved), *disk_items(job)), room.most_phase)


def _pass(job: Job, room: SimulatedMemory, gradients: dict[object, Held]) -> int:
    """Forward and back; gradients are added to those of the passes before. Returns what waits on the host."""
    divided = Divided(job, room, gradients, whole_sizes(job)) if job.shards > 1 else None
    waiting = OffloadedBytes(room) if "activations" in job.offload else None
    leaving: deque[Held] = deque()
    updating = update_bytes(job)

    def learn(gradient: Gradient, made: Held) -> None:
        if divided is not None:
            divided.learn(gradient, made)
        elif job.fuse_update:
            room.briefly(updating)
        elif "optimizer" in job.offload:
            leaving.append(made)
            while len(leaving) > 1 and sum(held.size for held in leaving) > ROOM:
                leaving.popleft()
        else:  # the first stays, others are added to it
            gradients.setdefault(gradient.weight, made)

    tape = Tape(room, learn)

    @contextmanager
    def around(number: int, learns: bool) -> Generator[None]:
        with ExitStack() as stack:
            if divided is not None:
                stack.enter_context(divided.block(tape, number, learns))
            if waiting is not None:
                stack.enter_context(waiting.block(tape, number, learns))
            yield

    if divided is not None:
        divided.begin()
    forward_backward(operators(job, tape), around)
    if divided is not None:
        divided.end()
    return 0 if waiting is None else waiting.most


def operators(job: Job, tape: Tape) -> Operators:
    """In this job's form and sizes."""
    item = compute_size(job)
    once = job.passes == 1 and job.ranks == 1
    return Operators(
        job=job,
        tape=tape,
        tokens=job.pass_tokens,
        form=job.form,
        item=item,
        copies=copied(job),
        gradient=item if once else WIDE,
    )


def compute_size(job: Job) -> int:
    """Bytes of an activation; fp8 is of products alone."""
    return SIZE["bfloat16" if job.compute == "fp8" else job.compute]


def _device_items(job: Job, room: SimulatedMemory) -> list[Item]:
    """What was alive at the worst moment, and what no allocator counts."""
    items = [Item(kind, room.most[kind], why) for kind, why in whys(job, room).items() if room.most.get(kind)]
    assert sum(item.bytes for item in items) == room.peak
    kind = device_kind(job.device)
    if kind.context_bytes:
        share = int(FRAGMENTS * room.peak)
        items.append(Item("fragmentation", share, f"assumed: {FRAGMENTS:.0%} of what is allocated"))
        items.append(Item("context", kind.context_bytes, f"assumed: {kind.software} and its kernels"))
    elif job.device == "cpu" and job.process:
        part = HEAP + (SEVERAL if job.passes > 1 else 0)
        share = int(part * room.peak + UNSEEN * max(0, room.peak - job.measured_with))
        items.append(Item("heap", share, "assumed: free in pieces too small, beyond what was measured"))
    return items


def whys(job: Job, room: SimulatedMemory) -> dict[str, str]:
    """Each kind of memory and why there is so much of it, in the order of the table."""
    trains = sum(weight.rows * weight.columns for weight in trained(job))
    whole = shapes_of(job.sizes).parameters
    divided = f", divided among {job.shards} ranks" if job.shards > 1 else ""
    frozen = "" if job.method == "full" else f"{whole / 1e9:.3g} B frozen in {job.base}, "
    size = {2: job.compute, 4: "float32"}[trained_size(job)]
    kept = {"off": "all that backward needs", "blocks": "of each block its input, and one block whole"}
    how = kept[job.recompute] if isinstance(job.recompute, str) else "what the plan of recomputation keeps"
    rows = f"{job.pass_tokens:,} tokens a pass"
    return {
        "parameters": f"{frozen}{trains / 1e6:,.4g} M trained in {size}{divided}",
        "copies": f"weights in {job.compute} beside their masters",
        "optimizer": f"{job.optimizer}'s state of {trains / 1e6:,.4g} M weights{divided}",
        "gradients": f"those that are there in the worst moment, which is: {room.most_phase}",
        "gathered": "weights and gradients of a block and its neighbour, whole, and all outside of blocks",
        "activations": f"{rows}: {how}",
        "logits": f"of the {job.learnt:,} targets of a pass, a chunk at a time",
        "workspace": f"of the operator at work in the worst moment ({room.most_phase})",
    }
