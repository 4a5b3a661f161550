"""The most memory that a run needs, before it runs: a step is rehearsed with bytes for tensors, and what was
alive at its worst moment is the prediction (docs/why/memory-model.md).
"""

from collections import deque
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from glm_accelerate.memory.activations import forward_backward, hidden
from glm_accelerate.memory.around import Divided, OffloadedBytes
from glm_accelerate.memory.job import Estimate, Item, Job
from glm_accelerate.memory.offload import ROOM
from glm_accelerate.memory.operators import Operators
from glm_accelerate.memory.rehearsal import Held, SimulatedMemory, Tape, WeightGradient
from glm_accelerate.memory.weights import (
    WIDE,
    away_bytes,
    copy_bytes,
    parameter_bytes,
    reduce_bytes,
    state_bytes,
    trained,
    trained_size,
    update_bytes,
    weights_of,
)
from glm_accelerate.models.shapes import shapes_of
from glm_accelerate.runtime.device import device_kind
from glm_accelerate.runtime.words import amount

PROCESS = 450 * 2**20  # assumed, as it depends on builds: a Python process with torch and what we import
WRITER = 300 * 2**20  # assumed: the process that writes checkpoints
FRAGMENTS = 0.03  # assumed: share of an allocator's memory that is free in pieces too small
HEAP = 0.01  # ... of a heap's
SEVERAL = 0.1  # ... of a heap's where a step has several passes: the second finds holes that the first left
SHARED = 0.1  # ... where ranks share products: what they exchange comes and goes between what is kept
UNSEEN = 0.07  # ... of a heap's that is more than was measured with (-3 to 18 % with eight blocks after two)


def estimate(job: Job) -> Estimate:
    """What the rank that needs most takes."""
    if job.stages:
        most = max(map(estimate, job.of_stages()), key=lambda each: each.peak + each.host)
        on_disk = _checkpoints(replace(job, stages=()))
        return replace(most, items=(*(item for item in most.items if item.where != "disk"), on_disk))
    room = SimulatedMemory()
    kept = [
        Held(room, "parameters", parameter_bytes(job)),
        Held(room, "optimizer", 0 if "optimizer" in job.offload else state_bytes(job)),
        Held(room, "copies", copy_bytes(job)),
    ]
    gradients: dict[object, Held] = {}
    moved = 0
    count = min(2, job.passes)  # the first, and one that finds gradients
    for number in range(count):
        held = min(job.held, job.passes - number)
        moved = max(moved, _pass(job, held, room, gradients, last=number + 1 == count))
    room.phase = "update"
    room.briefly(reduce_bytes(job))
    room.briefly(update_bytes(job))
    kept.clear()
    items = (*_device_items(job, room), *_host_items(job, moved), _checkpoints(job))
    return Estimate(items, room.most_phase)


def _pass(job: Job, held: int, room: SimulatedMemory, gradients: dict[object, Held], last: bool) -> int:
    """Forward and back, as the last of so many that have been forward; gradients are added to those of the
    passes before. Returns what waits on the host.
    """
    divided = Divided(job, room, gradients, last) if job.shards > 1 else None
    waiting = OffloadedBytes(room) if "activations" in job.offload else None
    leaving: deque[Held] = deque()
    updating = update_bytes(job)

    def take(gradient: WeightGradient, held: Held) -> None:
        if divided is not None:
            divided.take(held)
        elif job.fuse_update:
            room.briefly(updating)
        elif "optimizer" in job.offload:
            leaving.append(held)
            while len(leaving) > 1 and sum(each.size for each in leaving) > ROOM:
                leaving.popleft()
        else:  # the first stays, others are added to it
            gradients.setdefault(gradient.weight, held)

    tape = Tape(room, take)

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
    others = [Operators(job, Tape(room, take)) for _ in range(held - 1)]
    ahead = [hidden(each, around) for each in others]
    forward_backward(Operators(job, tape), around)
    ahead.clear()
    for each in others:
        each.tape.nodes.clear()  # which know it: else they would go when Python next looks for circles
    if divided is not None:
        divided.end()
    return 0 if waiting is None else waiting.most


def _device_items(job: Job, room: SimulatedMemory) -> list[Item]:
    """What was alive at the worst moment, and what no allocator counts."""
    items = [
        Item(kind, room.most[kind], why) for kind, why in _whys(job, room).items() if room.most.get(kind)
    ]
    assert sum(item.bytes for item in items) == room.peak
    kind = device_kind(job.device)
    if kind.context_bytes:
        share = int(FRAGMENTS * room.peak)
        items.append(Item("fragmentation", share, f"assumed: {FRAGMENTS:.0%} of what is allocated"))
        items.append(Item("context", kind.context_bytes, f"assumed: {kind.software} and its kernels"))
    elif job.device == "cpu" and job.process:
        again = job.passes > job.held  # a pass begins after another one's backward
        part = HEAP + (SEVERAL if again else 0) + (SHARED if job.tensor > 1 else 0)
        share = int(part * room.peak + UNSEEN * max(0, room.peak - job.measured_with))
        items.append(Item("heap", share, "assumed: free in pieces too small, beyond what was measured"))
    return items


def _whys(job: Job, room: SimulatedMemory) -> dict[str, str]:
    """Each kind of memory and why there is so much of it, in the order of the table."""
    trains = sum(weight.rows * weight.columns for weight in trained(job))
    whole = shapes_of(job.sizes).parameters
    divided = f", divided among {job.shards} ranks" if job.shards > 1 else ""
    frozen = "" if job.method == "full" else f"{whole / 1e9:.3g} B frozen in {job.base}, "
    size = {2: job.compute, 4: "float32"}[trained_size(job)]
    kept = {"off": "all that backward needs", "blocks": "of each block its input, and one block whole"}
    return {
        "parameters": f"{frozen}{trains / 1e6:,.4g} M trained in {size}{divided}",
        "copies": f"weights in {job.compute} beside their masters",
        "optimizer": f"{job.optimizer}'s state of {trains / 1e6:,.4g} M weights{divided}",
        "gradients": f"those that are there in the worst moment, which is: {room.most_phase}",
        "gathered": "weights and gradients of a block and its neighbour, whole, and all outside of blocks",
        "activations": f"{job.pass_tokens:,} tokens a pass: {kept[job.recompute]}",
        "logits": f"of the {job.learnt:,} targets of a pass, a chunk at a time",
        "workspace": f"of the operator at work in the worst moment ({room.most_phase})",
    }


def _host_items(job: Job, moved: int) -> list[Item]:
    """What a run takes of the host's memory beside the device. `moved`: activations that wait there."""
    weights = WIDE * sum(weight.part(job.shards) for weight in trained(job))
    state = state_bytes(job)
    items: list[Item] = []

    def add(what: str, size: int, why: str) -> None:
        items.append(Item(what, size, why, "host"))

    if job.process:
        why = "measured here: Python, torch, libraries' workspaces and what the heap cannot use"
        add("process", job.process, why)
    else:
        libraries = device_kind(job.device).process_bytes
        add("process", PROCESS + libraries, "assumed: Python, torch and its libraries")
    if job.saves:
        add("staging", weights + state, "one copy of what training moves, for the writer")
        add("writer", WRITER, "assumed: the process that writes checkpoints")
    if job.snapshots:
        add("snapshot", weights, "one copy of the weights that train, for the evaluator")
    if job.evaluator:
        model = sum(weight.bytes(1) for weight in weights_of(job))
        size = PROCESS + model + weights * job.shards
        add("evaluator", size, "another process with a model of its own")
    if "optimizer" in job.offload:
        wide = weights + state + weights // (2 if job.passes == 1 else 1)
        add("optimizer", wide, "offloaded: float32 weights, moments, gradients")
    if "weights" in job.offload:
        add("weights", sum(away_bytes(job)), "offloaded: frozen weights of blocks")
    if moved:
        add("activations", moved, "offloaded until the backward pass")
    return items


def _checkpoints(job: Job) -> Item:
    """Checkpoints hold weights that train and their moments; one more is there while it is written."""
    size = WIDE * sum(weight.part(1) for weight in trained(job)) + state_bytes(job) * job.shards
    why = f"{job.kept_saves} checkpoints and the one being written, {amount(size)} each"
    return Item("checkpoints", size * (job.kept_saves + 1), why, "disk")
