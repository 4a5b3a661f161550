"""What a run takes of host memory and of disk, beside the device."""

from glm_accelerate.memory.job import Item, Job
from glm_accelerate.memory.optimizer_state import state_bytes, trained
from glm_accelerate.memory.weights import WIDE, away_bytes, weights_of
from glm_accelerate.runtime.device import device_kind
from glm_accelerate.runtime.words import amount

PROCESS = 450 * 2**20  # assumed, as it depends on builds: a Python process with torch and what we import
WRITER = 300 * 2**20  # assumed: the process that writes checkpoints


def host_items(job: Job, moved: int) -> list[Item]:
    """`moved`: activations that wait on the host."""
    weights = WIDE * sum(weight.part(job.shards) for weight in trained(job))
    state = state_bytes(job)
    process = job.process or PROCESS + device_kind(job.device).process_bytes
    why = "measured here: Python, torch, libraries' workspaces and what the heap cannot use"
    why = why if job.process else "assumed: Python, torch and its libraries"
    items: list[Item] = [Item("process", process, why, "host")]
    if job.saves:
        why = "one copy of what training moves, for the writer"
        items.append(Item("staging", weights + state, why, "host"))
        items.append(Item("writer", WRITER, "assumed: the process that writes checkpoints", "host"))
    if job.snapshots:
        items.append(
            Item("snapshot", weights, "one copy of the weights that train, for the evaluator", "host")
        )
    if job.evaluator:
        whole = (
            sum(int(weight.part(1) * weight.itemsize) for weight in weights_of(job)) + weights * job.shards
        )
        items.append(Item("evaluator", PROCESS + whole, "another process with a model of its own", "host"))
    if job.process and job.shards > 1:
        copies = 1 + 3 / job.ranks
        travels = int(copies * WIDE * sum(weight.part(1) for weight in trained(job)))
        items.append(
            Item("gloo", travels, f"assumed: {copies:.2g} copies of the gradients that travel", "host")
        )
    if "optimizer" in job.offload:
        wide = weights + state + weights // (2 if job.passes == 1 else 1)
        items.append(Item("optimizer", wide, "offloaded: float32 weights, moments, gradients", "host"))
    if "weights" in job.offload:
        items.append(Item("weights", sum(away_bytes(job)), "offloaded: frozen weights of blocks", "host"))
    if moved:
        items.append(Item("activations", moved, "offloaded until the backward pass", "host"))
    return items


def disk_items(job: Job) -> list[Item]:
    """Checkpoints hold weights that train and their moments; one more is there while it is written."""
    whole = sum(weight.part(1) for weight in trained(job)) * WIDE
    size = whole + state_bytes(job) * job.shards
    why = f"{job.kept_saves} checkpoints and the one being written, {amount(size)} each"
    return [Item("checkpoints", size * (job.kept_saves + 1), why, "disk")]
