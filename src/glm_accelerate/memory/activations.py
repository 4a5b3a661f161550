"""One pass forward and back of the decoder and its loss, as models/decoder.py and training/step.py have them,
with bytes for tensors.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from glm_accelerate.kernels.choose import Form
from glm_accelerate.kernels.linear_cross_entropy import CPU_BYTES, GPU_BYTES, chunk_rows
from glm_accelerate.memory.operators import Operators
from glm_accelerate.memory.rehearsal import Edge, Held, Value, WeightGradient
from glm_accelerate.memory.weights import (
    SIZE,
    WIDE,
    Layer,
    block_trains,
    frozen_dtype,
    projections_of,
    trained_size,
)
from glm_accelerate.runtime.device import device_kind

Around = Callable[[int, bool], AbstractContextManager[None]]  # a block's number, and whether it learns
INDEX = 8  # bytes of a token's number, place or position


def forward_backward(ops: Operators, around: Around) -> None:
    """The gradients of a batch's loss, given to the tape's `take`. `around`: what is done with a block's
    weights, or with what it keeps, when it runs.
    """
    room = ops.tape.room
    room.phase = "forward"
    out = hidden(ops, around)
    if ops.job.heads:
        out = _loss(ops, ops.gather(out))
    if out.edge is None:  # a stage in which nothing trains
        return
    room.phase = "backward"
    out.edge.gradient = out if ops.job.heads else ops.kept(ops.H)  # the next stage's
    if ops.job.heads:
        del out
    ops.tape.backward()


def hidden(ops: Operators, around: Around) -> Value:
    """What the head reads, or the next stage."""
    job, s = ops.job, ops.job.sizes
    full = job.method == "full"
    received = None if job.method == "freeze" and job.last < s.layers else Edge()
    x = _embedded(ops, full) if job.embeds else Value(ops.tape.room, ops.H, received)
    positions = ops.kept(INDEX * ops.tokens)
    table = ops.kept(ops.wide(s.rope_width))
    prefix = ops.prefix() if job.method == "prefix" else []
    learns = x.edge is not None
    for number in range(s.layers):
        learns = learns or job.method in ("lora", "prefix") or block_trains(job, number)
        run = partial(_block, ops, x, number, table, prefix[2 * number : 2 * number + 2])
        with around(number, learns):
            x = run() if job.recompute == "off" else ops.tape.again(run, learns)
        del run
    del positions
    ops.begin(s.layers)
    return ops.norm(x, full) if job.heads else x


def _embedded(ops: Operators, trains: bool) -> Value:
    job, s = ops.job, ops.job.sizes
    size = trained_size(job) if trains else SIZE[frozen_dtype(job)]
    weights = [WeightGradient("embedding", s.vocabulary * s.width * size)] if trains else []
    x = ops.op([ops.tokens * s.width * size], [], weights=weights)[0]
    if ops.job.tensor > 1:
        x = ops.op([ops.rows * s.width * size], [x])[0]
    return x if size == ops.item else ops.op([ops.H], [x])[0]


def _block(ops: Operators, x: Value, number: int, table: Held, prefix: Sequence[Value]) -> Value:
    ops.begin(number)
    trains = block_trains(ops.job, number)
    attended = _attention(ops, ops.norm(x, trains), number, table, prefix)
    if not ops.job.sizes.sandwich:
        x, normed = ops.sum_norm(x, attended, trains)
        return ops.add(x, _mlp(ops, normed, number))
    x, normed = ops.sandwich(x, attended, trains)
    return ops.add_norm(x, _mlp(ops, normed, number), trains)


def _attention(ops: Operators, x: Value, number: int, table: Held, prefix: Sequence[Value]) -> Value:
    s, x = ops.job.sizes, ops.gather(x)
    *projections, last, _, _ = projections_of(ops.job, number)
    if s.fused_qkv:
        qkv = _project(ops, x, projections[0])
        outs = [ops.size(heads * s.head_width) for heads in (s.heads, s.kv_heads, s.kv_heads)]
        q, k, v = ops.op(outs, [qkv], of=qkv)
        del qkv
    else:
        q, k, v = (_project(ops, x, layers) for layers in projections)
    return ops.sum(_project(ops, ops.attention(q, k, v, table, prefix), last))


def _mlp(ops: Operators, x: Value, number: int) -> Value:
    *_, gate_up, down = projections_of(ops.job, number)
    return ops.sum(_project(ops, ops.swiglu(_project(ops, ops.gather(x), gate_up)), down))


def _project(ops: Operators, x: Value, layers: Sequence[Layer]) -> Value:
    for layer in layers:
        x = ops.linear(x, layer)
    return x


def _loss(ops: Operators, hidden: Value) -> Value:
    """Logits a chunk of rows at a time; what is kept are the gradients, from the same pass."""
    job, s, item = ops.job, ops.job.sizes, ops.item
    places = ops.kept(2 * INDEX * job.learnt)
    picked = ops.op([job.learnt * s.width * item], [hidden], keeps=[places])[0]
    ops.tape.room.phase = "loss"
    trains, head = job.method == "full", s.vocabulary * s.width
    kernel = job.form in ("triton", "native")
    budget = GPU_BYTES if job.form == "triton" else CPU_BYTES
    if trains and job.form != "triton":
        budget = max(budget, WIDE * head)
    rows = chunk_rows(job.learnt, s.vocabulary, item if kernel else WIDE, budget)
    one, rows = rows >= job.learnt, min(rows, job.learnt)
    at_loss, after = (s.vocabulary * rows * each for each in _logits(job.form, item))
    by_hidden = after + rows * s.width * item + ops.scratch(s.vocabulary, s.width, rows)
    keeps = [ops.kept(picked.bytes if picked.edge is not None else 0)]
    weights: list[WeightGradient] = []
    narrow = 0 if _head_is_ready(ops) else head * item
    during = max(at_loss, by_hidden)
    if trains:
        wide = device_kind(job.device).wide_products
        part = head * (WIDE if wide else item)  # of one chunk; more are summed in float32
        kept, size = part if one else head * WIDE, head * (ops.gradient if ops.copies else trained_size(job))
        added = (
            0 if part == head * WIDE else head * WIDE
        )  # a float32 copy, once the logits' gradients are gone
        during = max(during - kept, after) if one else max(during, part + max(after, added))
        held = ops.kept(kept, "gradients")
        if kept == size:
            weights = [WeightGradient("embedding" if s.tied else "head", size, held=held)]
        else:  # cast in the backward pass
            weights = [WeightGradient("embedding" if s.tied else "head", size)]
            keeps.append(held)
        del held
    return ops.op([WIDE], [picked], keeps=keeps, during=narrow + during, during_as="logits", weights=weights)[
        0
    ]


def _head_is_ready(ops: Operators) -> bool:
    """Whether the head's weights are there in the dtype of activations."""
    if ops.job.method != "full":
        return SIZE[frozen_dtype(ops.job)] == ops.item
    return ops.item == trained_size(ops.job) or (ops.ready and not ops.job.sizes.tied)


def _logits(form: Form, item: int) -> tuple[int, int]:
    """Bytes of a logit and its gradient together: where the loss is computed, and after it."""
    if form in ("triton", "native") or (form == "eager" and item == WIDE):
        return item, item  # one takes the place of the other
    return 2 * item + (WIDE if item < WIDE else 0), 2 * item
