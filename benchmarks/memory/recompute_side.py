"""One side of the benchmark of recomputation, in a process of its own: builds its model, runs passes forward
and back, and prints what they took as JSON.
"""

import ctypes
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from torch.profiler import ProfilerActivity, profile

from benchmarks.memory.plain_block import PlainBlock
from benchmarks.memory.tracked import allocations, borrowed, most_between
from benchmarks.race.job import memory_now, memory_peak
from glm_accelerate.kernels.choose import Form
from glm_accelerate.kernels.linear_cross_entropy import linear_cross_entropy
from glm_accelerate.kernels.native.build import load as native_library
from glm_accelerate.kernels.rope import rope_table
from glm_accelerate.memory.chain import BlockCosts, Plan
from glm_accelerate.memory.measure import measure
from glm_accelerate.memory.recompute import curve
from glm_accelerate.memory.selective import apply
from glm_accelerate.models.adapt.lora import LoraSettings, add_lora
from glm_accelerate.models.bind import bind_operators
from glm_accelerate.models.decoder import Decoder, Origin
from glm_accelerate.models.layout import Layout
from glm_accelerate.models.linear import Linear
from glm_accelerate.models.sizes import Sizes

LORA = LoraSettings(rank=8, alpha=32.0, dropout=0.1)


@dataclass(frozen=True)
class Size:
    """Of the model, and of one pass: rows of one document each."""

    layers: int = 24
    width: int = 512
    rows: int = 2
    length: int = 512
    passes: int = 5

    @property
    def sizes(self) -> Sizes:
        heads = self.width // 64
        mlp = round(self.width * 3.35 / 32) * 32  # as GLM-4-9B-0414 has it
        return Sizes(
            vocabulary=8192, width=self.width, mlp_width=mlp, layers=self.layers, heads=heads,
            kv_heads=max(1, heads // 8), head_width=64, norm_epsilon=1e-5, rope_theta=1e4, rope_width=32,
            qkv_bias=True, max_positions=4096, sandwich=True,
        )  # fmt: skip


@dataclass(frozen=True)
class Task:
    """What a side does: torch.compile under a `budget`, ours with a `plan`, or ours that measures."""

    size: Size
    method: str
    threads: int
    plan: dict[str, Any] | None = None
    budget: float | None = None
    measures: bool = False
    tracks: bool = False  # memory, tensor by tensor: always the same


@dataclass(frozen=True)
class Took:
    """Of one pass."""

    seconds: float  # median
    bytes: int  # most at once, beyond what was there before it: the allocator's own count
    resident: int  # most that the process grew by
    loss: float
    digest: list[float]  # the sum of each gradient


Pass = Callable[[], Tensor]


def ours(size: Size, method: str) -> tuple[Decoder, Pass, Layout]:
    torch.manual_seed(0)
    model = Decoder(size.sizes, Origin("glm4", {}, "")).train()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else nn.init.ones_(parameter)
    if method == "lora":
        model.to(torch.bfloat16)
        add_lora(model, LORA)
    model.compute = torch.bfloat16
    bind_operators(model, compiled=True)
    for part in model.modules():
        if type(part) is Linear and part.native and part.weight.requires_grad:
            part.keep_copy(torch.bfloat16)  # as training does it, with an optimizer that writes both
    layout = Layout.of_documents([(size.length,)] * size.rows)
    tokens = torch.randint(size.sizes.vocabulary, (size.rows, size.length))

    def run() -> Tensor:
        hidden = model.hidden(tokens, layout).flatten(0, 1)
        return linear_cross_entropy(hidden, model.head.weight, tokens.flatten(), model.form)

    return model, run, layout


def compiled(size: Size, method: str, budget: float) -> tuple[nn.Module, Pass]:
    """As torchtitan does it: every block compiled, its backward pass planned under torch's budget."""
    import torch._functorch.config as functorch  # here: only this side pays for it

    functorch.activation_memory_budget = budget
    torch.manual_seed(0)
    sizes, lora = size.sizes, LORA if method == "lora" else None
    blocks = nn.ModuleList(PlainBlock(sizes, lora) for _ in range(sizes.layers)).train()
    trained = lora is None
    dtype = torch.float32 if trained else torch.bfloat16
    words, head = (
        nn.Parameter(torch.randn(sizes.vocabulary, sizes.width).mul_(0.02).to(dtype), trained) for _ in "ab"
    )
    model = nn.ParameterList([words, head, *blocks.parameters()])
    positions = torch.arange(size.length)[None]
    table = torch.view_as_real(rope_table(positions, sizes.rope_width, sizes.rope_theta)).flatten(0, -3)
    table = table.view(size.length, -1, 2).contiguous()
    tokens = torch.randint(sizes.vocabulary, (size.rows, size.length))
    for block in blocks:
        block.compile()
    form: Form = "eager" if native_library() else "native"

    def run() -> Tensor:
        x = embedding(tokens, words).to(torch.bfloat16)
        for block in blocks:
            x = block(x, table)
        return linear_cross_entropy(x.flatten(0, 1), head, tokens.flatten(), form)

    return model, run


class Loss(nn.Module):
    """What comes after the blocks, as one more."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.norm, self.head = model.norm, model.head
        self.form: Form = model.form

    def forward(self, x_BTH: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(self.norm(x_BTH).flatten(0, 1), self.head.weight, labels, self.form)


def chain_of(model: Decoder, layout: Layout, size: Size) -> list[BlockCosts]:
    """One block measured stands for all, and the loss comes after them."""
    x = torch.randn(size.rows, size.length, size.width).to(torch.bfloat16)
    table = rope_table(layout.positions_BT, size.sizes.rope_width, size.sizes.rope_theta)
    block = measure(model.layers[0], x, layout, table, None, None)
    loss = measure(Loss(model), x, layout.positions_BT.flatten())
    return [block] * size.layers + [replace(loss, options=loss.options[:1])]


def took(model: nn.Module, run: Pass, passes: int, tracks: bool) -> Took:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def drop() -> None:
        for parameter in trained:
            parameter.grad = None

    def once() -> tuple[float, Tensor]:
        drop()
        torch.manual_seed(1)
        begun = time.perf_counter()
        loss = run()
        loss.backward()
        return time.perf_counter() - begun, loss.detach()

    once()  # compiles, and makes what stays
    drop()
    ctypes.CDLL(None).malloc_trim(0)  # what is free goes back, and is not taken for what is in use
    Path("/proc/self/clear_refs").write_text("5")  # forget the most until here
    resident = memory_now()
    times, loss = zip(*(once() for _ in range(passes)), strict=True)
    resident = memory_peak() - resident
    digest = [float(p.grad.double().sum()) for p in trained if p.grad is not None]
    most = tracked(once, drop) if tracks else 0
    return Took(median(times), most, resident, float(loss[0]), digest)


def tracked(once: Callable[[], object], drop: Callable[[], None]) -> int:
    drop()
    with borrowed() as loans, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        begun = time.time_ns()
        once()
    changes = [change for change in allocations(seen) + loans if change.moment >= begun]
    return most_between(changes, begun)


def main(task: Task) -> dict[str, Any]:
    torch.set_num_threads(task.threads)
    if task.budget is not None:
        model, run = compiled(task.size, task.method, task.budget)
        return asdict(took(model, run, task.size.passes, task.tracks))
    model, run, layout = ours(task.size, task.method)
    if task.measures:
        run().backward()
        chain = chain_of(model, layout, task.size)
        return {"chain": [asdict(block) for block in chain[-2:]], "points": [asdict(p) for p in curve(chain)]}
    if task.plan is not None:
        plan = Plan.from_json(task.plan)
        apply(list(model.layers), Plan(plan.segments[:-1]) if plan.segments[-1].keep is None else plan)
    return asdict(took(model, run, task.size.passes, task.tracks))


if __name__ == "__main__":
    said: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    said["size"] = Size(**said["size"])
    print(json.dumps(main(Task(**said))))
