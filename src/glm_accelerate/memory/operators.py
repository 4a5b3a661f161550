"""What each operator of kernels/ returns, keeps for backward, and needs besides, in each of its forms.

Sizes are bytes: `wide(n)` of n numbers a token in float32, `size(n)` in the dtype of activations.
"""

from collections.abc import Sequence

import torch

from glm_accelerate.kernels.choose import SHORT, Form
from glm_accelerate.kernels.linear import LANES
from glm_accelerate.kernels.quantized import nf4_path
from glm_accelerate.memory.job import Job
from glm_accelerate.memory.rehearsal import Held, Tape, Value, WeightGradient
from glm_accelerate.memory.weights import (
    PACKED,
    SIZE,
    WIDE,
    Layer,
    copied,
    frozen_dtype,
    prefix_width,
    sent_size,
    trained_size,
)

UNPACKED = 1 << 22  # weights that kernels/quantized.py unpacks at once
# oneDNN's scratch memory for a product in bfloat16 on a CPU, measured on one thread (two: up to twice that):
# about this, and float32 sums of up to so many columns where what is summed over is longer than this.
SCRATCH, SUMMED, LONG = 1_180_000, 512, 2048
MULTIPROCESSORS = 132  # of an H100 or H200
FUSED: tuple[Form, ...] = ("native", "triton", "compiled")


class Operators:
    """The operators of a job's forward pass, recorded on a tape."""

    def __init__(self, job: Job, tape: Tape) -> None:
        self.job, self.tape, self.op = job, tape, tape.op
        self.tokens, self.form = job.pass_tokens, job.form
        self.item = SIZE["bfloat16" if job.compute == "fp8" else job.compute]  # bytes of an activation
        self.copies = copied(job)  # trained matrices are there in the activations' dtype, too
        self.ready = (sent_size(job) if job.shards > 1 else trained_size(job)) == self.item or self.copies
        # Bytes of a number of a matrix's gradient, where there are copies.
        self.gradient = self.item if job.passes == 1 and job.ranks == 1 else WIDE
        self.block = self.weight = -1  # which weight of which block comes next
        self.rows = job.pass_tokens // job.sizes.spread  # that norms and residual sums have
        self.H = self.rows * job.sizes.width * self.item

    def size(self, numbers: int) -> int:
        return self.tokens * numbers * self.item

    def wide(self, numbers: int) -> int:
        return self.tokens * numbers * WIDE

    def kept(self, size: int, kind: str = "activations") -> Held:
        """What an operator keeps of its own, beside its inputs and results."""
        return Held(self.tape.room, kind, size)

    def scratch(self, inner: int, outer: int, rows: int | None = None) -> int:
        """What a product of so many rows (all tokens) has besides."""
        if self.job.device != "cpu" or self.item == WIDE:
            return 0
        sums = min(outer, SUMMED) * WIDE if inner > LONG else 0
        return SCRATCH + (self.tokens if rows is None else rows) * sums

    def begin(self, block: int) -> None:
        """What follows belongs to this block."""
        self.block, self.weight = block, 0

    def learn(self, size: int, part: int = 0, block: int | None = None) -> WeightGradient:
        """The gradient of the next weight; `block`: whose it is, if another block has it, too."""
        self.weight += 1
        return WeightGradient((self.block if block is None else block, self.weight), size, part)

    # Norms and sums.

    def norm(self, x: Value, trains: bool) -> Value:
        """x / rms(x) * weight."""
        if self.form in FUSED:
            return self._fused_norms(1, [x], [x], trains)[0]
        s, numbers = self.job.sizes, self.rows * self.job.sizes.width * WIDE
        narrow = self.item < WIDE
        # Forward: x in float32. Backward: x and its gradient in float32, and their product.
        back = max(3 * numbers - self.H, 2 * numbers) if narrow else numbers
        return self.op(
            [self.H],
            [x],
            keeps=[x, self.kept(self.rows * WIDE)],
            during=numbers if narrow else 0,
            back=back + (numbers if trains else 0),
            weights=[self.learn(WIDE * s.width)] if trains else (),
        )[0]

    def sum_norm(self, x: Value, branch: Value, trains: bool) -> tuple[Value, Value]:
        """y = x + branch, and its norm."""
        if self.form not in ("native", "triton"):
            y = self.add(x, branch)
            return y, self.norm(y, trains)
        y, normed = self._fused_norms(1, [x, branch], [], trains, outs=2, keeps_first=True, shared=True)
        return y, normed

    def sandwich(self, x: Value, branch: Value, trains: bool) -> tuple[Value, Value]:
        """y = x + norm(branch), and its norm."""
        if self.form not in FUSED:
            y = self.add_norm(x, branch, trains)
            return y, self.norm(y, trains)
        y, normed = self._fused_norms(2, [x, branch], [branch], trains, outs=2, keeps_first=True)
        return y, normed

    def add_norm(self, x: Value, branch: Value, trains: bool) -> Value:
        """x + norm(branch)."""
        if self.form not in FUSED:
            return self.add(x, self.norm(branch, trains))
        native = self.form == "native"
        through = () if native else (0,)
        return self._fused_norms(1, [x, branch], [branch], trains, keeps_first=native, through=through)[0]

    def add(self, x: Value, branch: Value) -> Value:
        return self.op([x.bytes], [x, branch], through=(0, 1))[0]

    def _fused_norms(
        self,
        count: int,
        inputs: Sequence[Value],
        keeps: Sequence[Value],
        trains: bool,
        outs: int = 1,
        keeps_first: bool = False,
        through: Sequence[int] = (),
        shared: bool = False,
    ) -> list[Value]:
        """One kernel with so many norms. It keeps one number a row of each, and its weight in float32 where
        C++ reads a narrow one.
        """
        width = WIDE * self.job.sizes.width
        narrow = self.form == "native" and not trains and SIZE[frozen_dtype(self.job)] < WIDE
        return self.op(
            [self.H] * outs,
            inputs,
            keeps=[*keeps, self.kept(count * (self.rows * WIDE + (width if narrow else 0)))],
            keeps_first=keeps_first,
            through=through,
            shared=shared,
            weights=[self.learn(width) for _ in range(count * trains)],
        )

    # Between ranks that share every product (parallel/tensor.py).

    def gather(self, x: Value) -> Value:
        """What the first of two products reads: all tokens."""
        if self.job.tensor == 1:
            return x
        if self.job.sizes.spread == 1:
            return self.op([x.bytes], [x], of=x, back=x.bytes)[0]
        return self.op([x.bytes * self.job.sizes.spread], [x])[0]

    def sum(self, x: Value) -> Value:
        """Of what ranks made with the second: of all tokens, or of a part of them."""
        if self.job.tensor == 1:
            return x
        return self.op([self.H], [x], through=(0,) if self.job.sizes.spread == 1 else ())[0]

    # Linear layers.

    def linear(self, x: Value, layer: Layer) -> Value:
        """A layer of a block: plain, packed, with an adapter, or both."""
        if self.job.compute == "fp8":
            out = self._eight(x, layer)
        elif self.job.base in PACKED and not layer.trains:
            out = self._packed(x, layer)
        else:
            return self._lora(x, layer) if layer.adapted else self._plain(x, layer)
        return self._adapter(out, x, layer) if layer.adapted else out

    def _plain(self, x: Value, layer: Layer) -> Value:
        gradients: list[WeightGradient] = []
        if layer.trains:
            size = self.gradient if self.copies else trained_size(self.job)
            part = layer.weights * self.item if size != self.item else 0
            gradients = [self.learn(layer.weights * size, part, layer.blocks[0])]
            gradients += [self.learn(layer.outputs * WIDE, 0, layer.blocks[0])] if layer.bias else []
        return self.op(
            [self.size(layer.outputs)],
            [x],
            keeps=[*([x] if layer.trains else []), self._narrow(layer)],
            during=self.scratch(layer.inputs, layer.outputs),
            back=self.scratch(layer.outputs, layer.inputs),
            weights=gradients,
        )[0]

    def _narrow(self, layer: Layer) -> Held:
        """A copy of the weight in the dtype of activations, where it is kept in another."""
        ready = self.ready if layer.trains else self.item == SIZE[frozen_dtype(self.job)]
        return self.kept(0 if ready else layer.weights * self.item, "copies")

    def _lora(self, x: Value, layer: Layer) -> Value:
        """A layer that adds its adapter into its own output."""
        through, native = self._dropped(layer), self._our_lora(layer)
        back = x.bytes if x.edge is not None else through  # x's gradient through the adapter
        ends = (layer.inputs, layer.outputs)
        return self.op(
            [self.size(layer.outputs)],
            [x],
            keeps=[x, self._narrow(layer), self._adapter_kept(layer)],
            during=max(self.scratch(*ends), 0 if native else through),
            back=max(self.scratch(*reversed(ends)), (0 if native else back) + 2 * self.size(self.job.rank)),
            weights=self._adapter_gradients(layer),
        )[0]

    def _packed(self, x: Value, layer: Layer) -> Value:
        """The wide weight lives only while it is used."""
        chunk = min(layer.weights, max(layer.inputs, UNPACKED)) * unpacking(self.job)
        wide, ends = layer.weights * self.item, (layer.inputs, layer.outputs)
        return self.op(
            [self.size(layer.outputs)],
            [x],
            during=wide + max(chunk, self.scratch(*ends)),
            back=wide + max(chunk, self.scratch(*reversed(ends))),
        )[0]

    def _eight(self, x: Value, layer: Layer) -> Value:
        """Both are rounded to 8 bits for each product; x is kept so for a weight that learns. A matrix that a
        product sums along its rows is laid out anew.
        """
        given, out = self.tokens * layer.inputs, self.tokens * layer.outputs
        gradient = (layer.weights * WIDE, layer.weights * self.item, layer.blocks[0])
        return self.op(
            [self.size(layer.outputs)],
            [x],
            keeps=[self.kept(given if layer.trains else 0)],
            during=given + layer.weights,
            back=max(out + 2 * layer.weights, (2 * out + given) * layer.trains),
            weights=[self.learn(*gradient)] if layer.trains else (),
        )[0]

    def _adapter(self, out: Value, x: Value, layer: Layer) -> Value:
        """Added into what a packed layer returned, in place: the same memory with another backward pass."""
        through = self._dropped(layer)
        return self.op(
            [out.bytes],
            [out, x],
            keeps=[x, self._adapter_kept(layer)],
            during=through,
            of=out,
            through=(0,),
            back=through + 2 * self.size(self.job.rank),
            weights=self._adapter_gradients(layer),
        )[0]

    def _dropped(self, layer: Layer) -> int:
        """What passes a dropout is another tensor."""
        return self.size(layer.inputs) if self.job.dropout > 0 else 0

    def _adapter_kept(self, layer: Layer) -> Held:
        """What is between its two products, and the mask of a dropout unless a seed stands for it."""
        seeded = self.form == "triton" or (self._our_lora(layer) and self.job.base not in PACKED)
        return self.kept((0 if seeded else self._dropped(layer)) + self.size(self.job.rank))

    def _our_lora(self, layer: Layer) -> bool:
        """Whether our C++ computes it, as kernels/linear.py chooses."""
        return self.form == "native" and layer.inputs % LANES == 0

    def _adapter_gradients(self, layer: Layer) -> list[WeightGradient]:
        sizes = (self.job.rank * end * WIDE for end in (layer.inputs, layer.outputs))
        return [self.learn(size, size, layer.blocks[0]) for size in sizes]

    # The gated unit, and rotary positions.

    def swiglu(self, gate_up: Value) -> Value:
        """silu(gate) * up."""
        F = self.size(self.job.sizes.mlp_width)
        return self.op([F], [gate_up], keeps=[gate_up], back=0 if self.form in FUSED else F)[0]

    def rope(self, x: Value, heads: int) -> Value:
        """Pairs as complex numbers in float32, and their product, unless it is a kernel."""
        turned = 0 if self.form == "triton" else 2 * self.wide(heads * self.job.sizes.rope_width)
        return self.op([x.bytes], [x], during=turned, back=turned)[0]

    # Attention.

    def attention(self, q: Value, k: Value, v: Value, table: Held, prefix: Sequence[Value]) -> Value:
        """Attention of documents in a row: by our C++, by a kernel for packed rows, or one by one."""
        s = self.job.sizes
        query = self.size(s.heads * s.head_width)
        native = self.form == "native" and not prefix
        if native and not self.job.gathered:
            return self._attend(q, k, v, table, back=0)
        q, k = self.rope(q, s.heads), self.rope(k, s.kv_heads)
        if self.job.gathered:
            k, v = self._gather(k, v)
        if native:
            return self._attend(q, k, v, back=0)
        if self.job.device == "cpu":
            return self._by_document(q, k, v, prefix)
        if prefix:
            numbers = self._prefix_tokens * s.kv_heads * s.head_width
            k, v = self._behind(prefix, [k, v], numbers * self.item)
        # Flash attention sums the gradient of q in float32, in as many parts as its deterministic form needs
        # to keep all multiprocessors busy; keys' and values' are computed for every query head.
        parts = -(-MULTIPROCESSORS // (self.documents * s.heads))
        repeated = 2 * query if s.heads > s.kv_heads else 0
        back = self.wide(s.heads * (parts * s.head_width + 1)) + repeated
        return self._attend(q, k, v, table, back=back)

    @property
    def documents(self) -> int:
        pieces = 2 if self.job.gathered else 1
        return self.job.documents or max(pieces, -(-self.tokens // self.job.longest))

    @property
    def _prefix_tokens(self) -> int:
        return self.documents * self.job.prefix_tokens

    def _behind(self, prefix: Sequence[Value], keys_values: Sequence[Value], size: int) -> list[Value]:
        """Copies with the prefix before each document."""
        pairs = zip(keys_values, prefix, strict=True)
        return [self.op([x.bytes + size], [x, p], during=size, back=size)[0] for x, p in pairs]

    def _gather(self, k: Value, v: Value) -> list[Value]:
        """Keys and values of all tokens that pieces of documents see (parallel/context.py)."""
        job = self.job
        each = (k.bytes + v.bytes) // self.tokens
        whole = -(-job.gathered * 2 * job.context // (2 * job.context - 1))  # tokens of these documents
        own = -(-whole // job.context)
        seen, wide = (job.gathered + own) * each, whole * each // self.item * max(WIDE, self.item)
        outs = [(self.tokens + job.gathered) * x.bytes // self.tokens for x in (k, v)]
        sent = 2 * own * each  # what is sent, and made of keys and values for that
        during = own * each + seen + max(0, sent + whole * each - sum(outs))
        return self.op(outs, [k, v], during=during, back=seen + wide + wide // job.context)

    def _attend(self, q: Value, k: Value, v: Value, *also: Held, back: int = 0) -> Value:
        """A kernel that keeps what it reads and returns, and one number a query."""
        own = self.kept(self.wide(self.job.sizes.heads))
        return self.op([q.bytes], [q, k, v], keeps=[q, k, v, own, *also], keeps_first=True, back=back)[0]

    def _by_document(self, q: Value, k: Value, v: Value, prefix: Sequence[Value]) -> Value:
        """torch's attention on a CPU: keys and values repeated for every head, short documents in float32."""
        s, query = self.job.sizes, q.bytes
        if s.heads > s.kv_heads:
            k, v = (self.op([x.bytes // s.kv_heads * s.heads], [x])[0] for x in (k, v))
        item = WIDE if self.job.longest <= SHORT else self.item
        if item != self.item:
            q, k, v = (self.op([x.bytes // self.item * item], [x])[0] for x in (q, k, v))
        masks: list[Held] = []
        if prefix:  # before every head's keys and values, with a mask
            k, v = self._behind(prefix, [k, v], self._prefix_tokens * s.heads * s.head_width * item)
            masks = [self.kept(self.tokens * (self.job.longest + self.job.prefix_tokens) * item)]
        out = self._attend(q, k, v, *masks)
        masks.clear()
        if out.bytes != query:
            out = self.op([query], [out])[0]
        return out if self.documents == 1 else self.op([query], [out], through=(0,))[0]

    def prefix(self) -> list[Value]:
        """Learnt keys and values of every layer, views of one tensor, with a dropout before."""
        s = self.job.sizes
        each = self.job.prefix_tokens * s.kv_heads * s.head_width * WIDE
        size = self.job.prefix_tokens * prefix_width(self.job) * WIDE
        noise = size if self.job.dropout else 0
        parameter = None if noise else self.kept(0)  # without a dropout they are views of the parameter
        weights = [self.learn(size)]
        rows = self.op([size], [], keeps=[self.kept(noise)], of=parameter, back=noise, weights=weights)[0]
        return self.op([each] * 2 * s.layers, [rows], of=rows)


def unpacking(job: Job) -> int:
    """Bytes a weight that are alive beside it while it is unpacked: numbers in float32, and of nf4 codes. On
    GPUs it is assumed that bitsandbytes does it.
    """
    if job.base != "nf4":
        return 2 * WIDE
    kernel = job.device != "cpu" or nf4_path(torch.device("cpu")).path == "bitsandbytes"
    return 0 if kernel else WIDE + 2
