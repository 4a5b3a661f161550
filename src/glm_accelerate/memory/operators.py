"""What each operator of kernels/ makes, keeps for the way back, and needs besides, in each of its forms.

Sizes are bytes: `wide(n)` of n numbers a token in float32, `size(n)` in the dtype of activations.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from glm_accelerate.kernels.choose import SHORT, Form
from glm_accelerate.kernels.quantized import nf4_path
from glm_accelerate.memory.job import Job
from glm_accelerate.memory.rehearsal import Gradient, Held, Tape, Value
from glm_accelerate.memory.weights import PACKED, SIZE, WIDE, Layer, frozen_dtype, trained_size

UNPACKED = 1 << 22  # weights that kernels/quantized.py unpacks at once
# oneDNN's scratch memory for a product in bfloat16 on a CPU, measured on one thread (two: up to twice that):
# about this, and float32 sums of up to so many columns where what is summed over is longer than this.
SCRATCH, SUMMED, LONG = 1_180_000, 512, 2048
MULTIPROCESSORS = 132  # of an H100 or H200
FUSED: tuple[Form, ...] = ("native", "triton", "compiled")


@dataclass(slots=True)
class Operators:
    """Of a forward pass of `tokens`. `copies`: trained matrices are there in the activations' dtype, too."""

    job: Job
    tape: Tape
    tokens: int
    form: Form
    item: int  # bytes of an activation
    copies: bool
    gradient: int  # bytes of a number of a matrix's gradient, where there are copies
    block: int = -1
    weight: int = 0  # within the block

    def scratch(self, inner: int, outer: int, rows: int | None = None) -> int:
        """What a product of so many rows (all tokens) has besides."""
        if self.job.device != "cpu" or self.item == WIDE:
            return 0
        sums = min(outer, SUMMED) * WIDE if inner > LONG else 0
        return SCRATCH + (self.tokens if rows is None else rows) * sums

    def begin(self, block: int) -> None:
        """What follows belongs to this block."""
        self.block, self.weight = block, 0

    def learn(self, size: int, part: int = 0, block: int | None = None) -> Gradient:
        """The gradient of the next weight; `block`: whose it is, if another block has it, too."""
        self.weight += 1
        return Gradient((self.block if block is None else block, self.weight), size, part)

    def size(self, numbers: int) -> int:
        return self.tokens * numbers * self.item

    def wide(self, numbers: int) -> int:
        return self.tokens * numbers * WIDE

    @property
    def H(self) -> int:
        return self.size(self.job.sizes.width)

    # Norms and sums.

    def norm(self, x: Value, trains: bool) -> Value:
        """x / rms(x) * weight."""
        if self.form not in FUSED:
            return self._eager_norm(x, trains)
        own, gradients = self._of_norms(1, trains)
        return self.tape.op([self.H], [x], keeps=[x], own=own, slopes=[self.H], gradients=gradients)[0]

    def sum_norm(self, x: Value, branch: Value, trains: bool) -> tuple[Value, Value]:
        """y = x + branch, and its norm."""
        if self.form not in ("native", "triton"):
            y = self.add(x, branch)
            return y, self.norm(y, trains)
        own, gradients = self._of_norms(1, trains)
        made = self.tape.op(
            [self.H, self.H],
            [x, branch],
            keeps_outs=[0],
            own=own,
            slopes=[self.H, "first"],
            gradients=gradients,
        )
        return made[0], made[1]

    def sandwich(self, x: Value, branch: Value, trains: bool) -> tuple[Value, Value]:
        """y = x + norm(branch), and its norm."""
        if self.form not in FUSED:
            y = self.add_norm(x, branch, trains)
            return y, self.norm(y, trains)
        own, gradients = self._of_norms(2, trains)
        made = self.tape.op(
            [self.H, self.H],
            [x, branch],
            keeps=[branch],
            keeps_outs=[0],
            own=own,
            slopes=[self.H, self.H],
            gradients=gradients,
        )
        return made[0], made[1]

    def add_norm(self, x: Value, branch: Value, trains: bool) -> Value:
        """x + norm(branch)."""
        if self.form not in FUSED:
            return self.add(x, self.norm(branch, trains))
        own, gradients = self._of_norms(1, trains)
        native = self.form == "native"
        return self.tape.op(
            [self.H],
            [x, branch],
            keeps=[branch],
            keeps_outs=[0] if native else [],
            own=own,
            slopes=[self.H if native else "through", self.H],
            gradients=gradients,
        )[0]

    def add(self, x: Value, branch: Value) -> Value:
        return self.tape.op([x.bytes], [x, branch], slopes=["through", "through"])[0]

    def _of_norms(self, count: int, trains: bool) -> tuple[list[tuple[str, int]], list[Gradient]]:
        """One number a row of each, and its weight in float32 where C++ reads a narrow one."""
        s = self.job.sizes
        narrow = self.form == "native" and not trains and SIZE[frozen_dtype(self.job)] < WIDE
        own = [("activations", count * (self.wide(1) + (WIDE * s.width if narrow else 0)))]
        return own, [self.learn(WIDE * s.width) for _ in range(count * trains)]

    def _eager_norm(self, x: Value, trains: bool) -> Value:
        s, numbers = self.job.sizes, self.wide(self.job.sizes.width)
        narrow = self.item < WIDE
        # There: x in float32. Back: x and its slope in float32 and their product; the result is narrow.
        back = max(3 * numbers - self.H, 2 * numbers) if narrow else numbers
        return self.tape.op(
            [self.H],
            [x],
            keeps=[x],
            own=[("activations", self.wide(1))],
            during=numbers if narrow else 0,
            slopes=[self.H],
            back=back + (numbers if trains else 0),
            gradients=[self.learn(WIDE * s.width)] if trains else (),
        )[0]

    # Linear layers.

    def linear(self, x: Value, layer: Layer) -> Value:
        """A layer of a block: plain, packed, with an adapter, or both."""
        apart = self._packed if self.job.base in PACKED and not layer.trains else None
        if self.job.compute == "fp8":
            apart = self._eight
        if apart is not None:
            out = apart(x, layer)
            return self._adapter(out, x, layer) if layer.adapted else out
        return self._lora(x, layer) if layer.adapted else self._plain(x, layer)

    def _plain(self, x: Value, layer: Layer) -> Value:
        narrow = self._narrow(layer)
        gradients: list[Gradient] = []
        if layer.trains:
            size = self.gradient if self.copies else trained_size(self.job)
            part = layer.weights * self.item if size != self.item else 0
            gradients = [self.learn(layer.weights * size, part, layer.blocks[0])]
            gradients += [self.learn(layer.outputs * WIDE, 0, layer.blocks[0])] if layer.bias else []
        return self.tape.op(
            [self.size(layer.outputs)],
            [x],
            keeps=[x] if layer.trains else [],
            own=[("copies", narrow)],
            during=self.scratch(layer.inputs, layer.outputs),
            slopes=[self.size(layer.inputs)],
            back=self.scratch(layer.outputs, layer.inputs),
            gradients=gradients,
        )[0]

    def _narrow(self, layer: Layer) -> int:
        """A copy of the weight in the dtype of activations, where it is kept in another."""
        if layer.trains:
            ready = self.copies or self.item == trained_size(self.job)
            return 0 if ready else layer.weights * self.item
        return 0 if SIZE[frozen_dtype(self.job)] == self.item else layer.weights * self.item

    def _lora(self, x: Value, layer: Layer) -> Value:
        """A layer that adds its adapter into its own output."""
        I, r = self.size(layer.inputs), self.size(self.job.rank)
        mask, drops = self._mask(layer)
        native = self.form == "native"
        # Back, besides the slope of x: its part through the adapter.
        through = I if x.edge is not None and not native else (I if drops else 0)
        return self.tape.op(
            [self.size(layer.outputs)],
            [x],
            keeps=[x],
            own=[("copies", self._narrow(layer)), ("activations", mask + r)],
            during=max(self.scratch(layer.inputs, layer.outputs), 0 if native or not drops else I),
            slopes=[I],
            back=max(self.scratch(layer.outputs, layer.inputs), (0 if native else through) + 2 * r),
            gradients=self._of_adapter(layer),
        )[0]

    def _packed(self, x: Value, layer: Layer) -> Value:
        """The wide weight lives only while it is used."""
        chunk = min(layer.weights, max(layer.inputs, UNPACKED)) * unpacking(self.job)
        wide, ends = layer.weights * self.item, (layer.inputs, layer.outputs)
        return self.tape.op(
            [self.size(layer.outputs)],
            [x],
            during=wide + max(chunk, self.scratch(*ends)),
            slopes=[self.size(layer.inputs)],
            back=wide + max(chunk, self.scratch(*reversed(ends))),
        )[0]

    def _eight(self, x: Value, layer: Layer) -> Value:
        """Both are rounded to 8 bits for each product; x is kept so for a weight that learns. A matrix that a
        product sums along its rows is laid out anew.
        """
        given, made = self.tokens * layer.inputs, self.tokens * layer.outputs
        back = max(made + 2 * layer.weights, (2 * made + given) * layer.trains)
        return self.tape.op(
            [self.size(layer.outputs)],
            [x],
            own=[("activations", given if layer.trains else 0)],
            during=given + layer.weights,
            slopes=[self.size(layer.inputs)],
            back=back,
            gradients=[self.learn(layer.weights * WIDE, layer.weights * self.item, layer.blocks[0])]
            if layer.trains
            else (),
        )[0]

    def _adapter(self, out: Value, x: Value, layer: Layer) -> Value:
        """Added into what a packed layer made, in place: the same memory with another way back."""
        I, r = self.size(layer.inputs), self.size(self.job.rank)
        mask, drops = self._mask(layer)
        return self.tape.op(
            [out.bytes],
            [out, x],
            keeps=[x],
            own=[("activations", mask + r)],
            during=I if drops else 0,
            of=out,
            slopes=["through", I],
            back=(I if drops else 0) + 2 * r,
            gradients=self._of_adapter(layer),
        )[0]

    def _mask(self, layer: Layer) -> tuple[int, bool]:
        """Bytes of the mask of a dropout that are kept; whether what passes it is another tensor."""
        drops = self.job.dropout > 0
        seeded = self.form == "triton" or (self.form == "native" and self.job.base not in PACKED)
        return (self.size(layer.inputs) if drops and not seeded else 0), drops

    def _of_adapter(self, layer: Layer) -> list[Gradient]:
        ends = (layer.inputs, layer.outputs)
        sizes = [self.job.rank * end * WIDE for end in ends]
        return [self.learn(size, size, layer.blocks[0]) for size in sizes]

    # The gated unit, and rotary positions.

    def swiglu(self, gate_up: Value) -> Value:
        """silu(gate) * up."""
        F = self.size(self.job.sizes.mlp_width)
        back = 0 if self.form in FUSED else F
        return self.tape.op([F], [gate_up], keeps=[gate_up], slopes=[2 * F], back=back)[0]

    def rope(self, x: Value, heads: int) -> Value:
        """Pairs as complex numbers in float32, and their product, unless it is a kernel."""
        turned = 0 if self.form == "triton" else 2 * self.wide(heads * self.job.sizes.rope_width)
        return self.tape.op([x.bytes], [x], during=turned, slopes=[x.bytes], back=turned)[0]

    # Attention.

    def attention(self, q: Value, k: Value, v: Value, table: Held, prefix: Sequence[Value]) -> Value:
        """Of documents in a row: by our C++, by a kernel for packed rows, or document by document."""
        s = self.job.sizes
        query = self.size(s.heads * s.head_width)
        if self.form == "native" and not prefix:
            return self._kept(q, k, v, table, back=0)
        q, k = self.rope(q, s.heads), self.rope(k, s.kv_heads)
        if self.job.device == "cpu":
            return self._by_document(q, k, v, prefix)
        if prefix:
            k, v = (self._behind(each, before) for each, before in zip((k, v), prefix, strict=True))
        # Flash attention sums the slope of q in float32, in as many parts as its deterministic form needs to
        # keep all multiprocessors busy; keys' and values' are made for every query head.
        parts = -(-MULTIPROCESSORS // (self.documents * s.heads))
        repeated = 2 * query if s.heads > s.kv_heads else 0
        back = self.wide(s.heads * (parts * s.head_width + 1)) + repeated
        return self._kept(q, k, v, table, back=back)

    @property
    def documents(self) -> int:
        return self.job.documents or -(-self.tokens // self.job.longest)

    def _behind(self, x: Value, prefix: Value) -> Value:
        """A copy with the prefix before each document."""
        s = self.job.sizes
        copies = self.documents * self.job.prefix_tokens * s.kv_heads * s.head_width * self.item
        return self.tape.op(
            [x.bytes + copies], [x, prefix], during=copies, slopes=[x.bytes, prefix.bytes], back=copies
        )[0]

    def _kept(self, q: Value, k: Value, v: Value, table: Held, back: int) -> Value:
        """A kernel that keeps what it read and made, and one number a query."""
        return self.tape.op(
            [q.bytes],
            [q, k, v],
            keeps=[q, k, v, table],
            keeps_outs=[0],
            own=[("activations", self.wide(self.job.sizes.heads))],
            slopes=[q.bytes, k.bytes, v.bytes],
            back=back,
        )[0]

    def _by_document(self, q: Value, k: Value, v: Value, prefix: Sequence[Value]) -> Value:
        """torch's attention on a CPU: keys and values repeated for every head, short documents in float32."""
        s, query = self.job.sizes, q.bytes
        if s.heads > s.kv_heads:
            k, v = (self.tape.op([query], [x], slopes=[x.bytes])[0] for x in (k, v))
        item = WIDE if self.job.longest <= SHORT else self.item
        size = query // self.item * item
        if item != self.item:
            q, k, v = (self.tape.op([size], [x], slopes=[x.bytes])[0] for x in (q, k, v))
        own = [("activations", self.wide(s.heads))]
        if prefix:  # before every head's keys and values, with a mask
            before = self.documents * self.job.prefix_tokens
            more = before * s.heads * s.head_width * item
            k, v = (
                self.tape.op([size + more], [x, p], during=more, slopes=[size, p.bytes], back=more)[0]
                for x, p in zip((k, v), prefix, strict=True)
            )
            own.append(("activations", self.tokens * (self.job.longest + self.job.prefix_tokens) * item))
        made = self.tape.op(
            [size],
            [q, k, v],
            keeps=[q, k, v],
            keeps_outs=[0],
            own=own,
            slopes=[q.bytes, k.bytes, v.bytes],
        )[0]
        if made.bytes != query:
            made = self.tape.op([query], [made], slopes=[made.bytes])[0]
        whole = self.documents == 1
        return made if whole else self.tape.op([query], [made], slopes=["through"])[0]

    def prefix(self) -> list[Value]:
        """Learnt keys and values of every layer, views of one tensor, with a dropout before."""
        s = self.job.sizes
        each = self.job.prefix_tokens * s.kv_heads * s.head_width * WIDE
        size = each * 2 * s.layers
        noise = size if self.job.dropout else 0
        rows = self.tape.op(
            [noise], [], own=[("activations", noise)], back=noise, gradients=[self.learn(size)]
        )[0]
        return self.tape.op([each] * 2 * s.layers, [rows], of=rows, slopes=[size])


def unpacking(job: Job) -> int:
    """Bytes a weight that are alive beside it while it is unpacked: numbers in float32, and of nf4 codes. On
    GPUs it is assumed that bitsandbytes does it.
    """
    if job.base != "nf4":
        return 2 * WIDE
    kernel = job.device != "cpu" or nf4_path(torch.device("cpu")).path == "bitsandbytes"
    return 0 if kernel else WIDE + 2
