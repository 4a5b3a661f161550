"""Ways to keep an optimizer's state, side by side: bytes, the peak of a step, its time, and what is learnt.

python -m benchmarks.memory.optimizers --out benchmarks/results [--steps 60] [--threads 2]

The race's GLM-4 (512 wide, 8 layers), all of it trained, from the same random weights on the same steps. Each
way runs in processes of its own: a short one for memory, one for time and loss.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.race.report import Origin, origin, publish
from glm_accelerate.config.schema import OptimSection
from glm_accelerate.data.collate import collate
from glm_accelerate.data.pack import ARRANGE
from glm_accelerate.data.types import FilePlace, Sample, Step
from glm_accelerate.evaluate.measuring.losses import held_out_loss
from glm_accelerate.models.bind import bind_operators
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.decoder import Origin as Source
from glm_accelerate.models.sizes import Sizes
from glm_accelerate.optim.build import build_optimizer
from glm_accelerate.optim.eight_bit import adamw_8bit
from glm_accelerate.optim.fused_backward import FusedBackward
from glm_accelerate.optim.host import HostOptimizer
from glm_accelerate.optim.one_pass import OnePassAdamW, keep_copies
from glm_accelerate.optim.schedule import rate
from glm_accelerate.optim.state import optimizer_state
from glm_accelerate.runtime.device import memory_in_use, reset_peak
from glm_accelerate.train.step import forward_backward

CPU = torch.device("cpu")
WORDS = 8000
SIZES = Sizes(  # as benchmarks/race/prepare_model.py has them
    vocabulary=WORDS,
    width=512,
    mlp_width=1712,
    layers=8,
    heads=8,
    kv_heads=2,
    head_width=64,
    norm_epsilon=1e-5,
    rope_theta=10_000.0,
    rope_width=32,
    qkv_bias=True,
    max_positions=32_768,
    sandwich=True,
)
WARM, SHORT = 3, 5  # steps that times leave out; steps of the process that memory is read from
FOLLOWERS = 4  # words that may follow a word, so that there is something to learn
LEAN = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "0"}  # freed memory is given back

ABOUT = """\
**weights**, **state**: on the device; **on the host**: master weights and moments, and a step's gradients.
**gradients**: the most alive at once on the device. **peak**: resident above what was before the model was
made, in the heaviest step, with freed memory given back to the system; on a CPU the host is the device, so
the peak of the host's optimizer has both in it. Times are medians of steps after the first {warm};
**first**: the first step, in which torchao compiles an update for each shape. The loss is the mean of the
last tenth of the steps, **held out** that of other sequences of the same language, in which each word may be
followed by {followers} others, so that the best is {best:.3f}. Nothing is clipped. AdamW's rate is
{adamw:g}, Adafactor's {adafactor:g} (times the size of a matrix's weights); both fall to zero.
"""


@dataclass(frozen=True)
class Way:
    """`rule`: what updates; `host`: in host memory; `fused`: within the backward pass."""

    rule: str
    host: bool = False
    fused: bool = False


WAYS = {
    "adamw": Way("adamw"),
    "adamw, fused": Way("adamw", fused=True),
    "adamw8bit": Way("adamw8bit"),
    "adamw8bit, fused": Way("adamw8bit", fused=True),
    "adafactor": Way("adafactor"),
    "adafactor, fused": Way("adafactor", fused=True),
    "adamw, host": Way("adamw", host=True),
    "adafactor, host": Way("adafactor", host=True),
}


@dataclass(frozen=True)
class Measured:
    """Of one process. Bytes and seconds."""

    weights: int
    state: int
    host: int
    gradients: int
    peak: int
    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    held_out: float


def model_of(seed: int, dtype: torch.dtype) -> Decoder:
    model = Decoder(SIZES, Source("glm4", {}, ""))
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            nn.init.constant_(parameter, float(name.endswith("norm.weight")))
        else:
            nn.init.normal_(parameter, std=0.02, generator=draw)
    model.to(dtype).compute = torch.bfloat16
    model.recompute = True  # where memory is short, blocks are computed again first of all
    bind_operators(model, compiled=True)
    return model.train()


def language(seed: int, length: int) -> Iterator[Sample]:
    """Sequences in which the next word is one of a few that follow this one."""
    follow = np.random.default_rng(0).integers(0, WORDS // 8, (WORDS, FOLLOWERS))
    draw = np.random.default_rng(seed)
    while True:
        words = [int(draw.integers(WORDS // 8))]
        for choice in draw.integers(0, FOLLOWERS, length - 1):
            words.append(int(follow[words[-1], choice]))
        yield Sample(np.array(words, np.int32), np.ones(length, np.bool_), FilePlace("made", 1))


def steps_of(seed: int, count: int) -> Iterator[Step]:
    """One pass of four documents each."""
    made = language(seed, 256)
    for number in range(1, count + 1):
        taken = [next(made) for _ in range(4)]
        batches = tuple(collate(each, taken) for each in ARRANGE["pack"]([256] * 4, 1024))
        targets = sum(batch.targets for batch in batches)
        yield Step(number, 0, batches, tuple(range(4)), 1024, targets)


def optimizer_of(model: Decoder, way: Way, learning_rate: float) -> Optimizer:
    groups: list[dict[str, Any]] = [{"params": list(model.parameters()), "weight_decay": 0.0}]

    def make(given: list[dict[str, Any]]) -> Optimizer:
        if way.rule == "adamw8bit":
            return adamw_8bit(given, lr=learning_rate, betas=(0.9, 0.999), eps=1e-8)
        named = [("", parameter) for group in given for parameter in group["params"]]
        return build_optimizer(named, OptimSection(name=way.rule), native=model.form == "native")  # pyright: ignore[reportArgumentType]

    return HostOptimizer(groups, make, CPU) if way.host else make(groups)


def nbytes(tensors: Iterator[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def watch_gradients(model: Decoder) -> Callable[[], int]:
    """The most bytes of gradients that were alive when one of them had just been made."""
    trained, most = list(model.parameters()), [0]

    def look(_: Tensor) -> None:
        most[0] = max(most[0], nbytes(p.grad for p in trained if p.grad is not None))

    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(look)
    return lambda: most[0]


def compile_once() -> None:
    """So that the compiler's own memory is not counted."""
    weight = nn.Parameter(torch.ones(64, 64))
    optimizer = adamw_8bit([{"params": [weight]}], lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    weight.grad = torch.ones(64, 64)
    optimizer.step()


def train(way: Way, steps: int, learning_rate: float) -> Measured:
    if way.rule == "adamw8bit":
        compile_once()
    before = resident()
    model = model_of(1, torch.bfloat16 if way.host else torch.float32)
    gradients = watch_gradients(model)
    optimizer = optimizer_of(model, way, learning_rate)
    keep_copies(optimizer, model)
    fused = FusedBackward(optimizer, model.parameters()) if way.fused else None
    peak, seconds, losses = 0, list[float](), list[float]()
    for step in steps_of(2, steps):
        reset_peak(CPU)
        began = time.perf_counter()
        share = rate(
            step.number - 1, steps, schedule="linear", warmup=max(1, steps // 10), decay=0.2, floor=0.0
        )
        set_learning_rate(optimizer, learning_rate * share)
        if fused is not None:
            fused.begin(len(step.batches))
        losses.append(forward_backward(model, step, CPU).item())
        if fused is None:
            optimizer.step()
            optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        peak = max(peak, memory_in_use(CPU) - before) if step.number > 1 else 0  # some compile in the first
    state = nbytes(iter(optimizer_state(optimizer, model.named_parameters()).values()))
    if isinstance(optimizer, OnePassAdamW):
        state += nbytes(iter(optimizer.copies.values()))
    return Measured(
        weights=nbytes(model.parameters()),
        state=0 if way.host else state,
        host=state + 2 * sum(p.numel() for p in model.parameters()) if way.host else 0,
        gradients=gradients(),
        peak=peak,
        seconds=tuple(seconds),
        losses=tuple(losses),
        held_out=held_out_loss(model, (b for step in steps_of(3, 8) for b in step.batches)).mean,
    )


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate


def alone(name: str, steps: int, given: argparse.Namespace, surroundings: dict[str, str]) -> Measured:
    """In a process of its own."""
    words = ["--way", name, "--steps", str(steps), "--threads", str(given.threads)]
    words += ["--rate", str(given.rate), "--adafactor-rate", str(given.adafactor_rate)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory.optimizers", *words],
        env={**os.environ, "OMP_NUM_THREADS": str(given.threads), "GOMP_SPINCOUNT": "2000", **surroundings},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    said = json.loads(done.stdout.splitlines()[-1])
    return Measured(**{**said, "seconds": tuple(said["seconds"]), "losses": tuple(said["losses"])})


def table(found: dict[str, tuple[Measured, Measured]]) -> str:
    lines = [
        "| | weights, MB | gradients, MB | state, MB | on the host, MB | peak, MB | to adamw "
        "| ms a step | first, s | loss | held out |",
        "| --- |" + " ---: |" * 10,
    ]
    first = next(iter(found.values()))[0].peak
    for name, (memory, course) in found.items():
        sizes = (memory.weights, memory.gradients, memory.state, memory.host, memory.peak)
        megabytes = " | ".join(f"{size / 1e6:,.0f}" for size in sizes)
        tenth = course.losses[-max(1, len(course.losses) // 10) :]
        times = f"{1e3 * median(course.seconds[WARM:]):,.0f} | {course.seconds[0]:.1f}"
        learnt = f"{sum(tenth) / len(tenth):.3f} | {course.held_out:.3f}"
        lines.append(f"| {name} | {megabytes} | {memory.peak / first:.2f} | {times} | {learnt} |")
    return "\n".join(lines)


def report(source: Origin, given: argparse.Namespace, text: str, parameters: int) -> str:
    about = ABOUT.format(
        warm=WARM,
        followers=FOLLOWERS,
        best=np.log(FOLLOWERS),
        adamw=given.rate,
        adafactor=given.adafactor_rate,
    )
    return "\n".join(
        [
            "# The optimizer's state, kept in several ways\n",
            f"- {source.date}; {source.machine}; load when it began {source.load:.1f}",
            f"- `{source.command}`",
            f"- commit {source.commit}",
            "- " + ", ".join(f"{name} {version}" for name, version in source.versions.items()),
            f"- GLM-4 0414, {parameters / 1e6:.1f} M parameters, all of them trained; {given.steps} steps",
            "  of 1,024 tokens in one pass, products in bfloat16, blocks computed again on the way back,",
            f"  {given.threads} threads\n",
            about,
            text + "\n",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--adafactor-rate", type=float, default=3e-2)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--way", choices=WAYS, help="this one alone, in this process; prints its figures")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.way is not None:
        torch.set_num_threads(given.threads)
        way = WAYS[given.way]
        print(
            json.dumps(
                asdict(
                    train(way, given.steps, given.adafactor_rate if way.rule == "adafactor" else given.rate)
                )
            )
        )
        return
    versions = {"torch": str(torch.__version__)}
    source = origin(["python", "-m", "benchmarks.memory.optimizers", *sys.argv[1:]], versions)
    found: dict[str, tuple[Measured, Measured]] = {}
    for name in given.ways:
        found[name] = alone(name, SHORT, given, LEAN), alone(name, given.steps, given, {})
        print(f"{name}: held-out loss {found[name][1].held_out:.4f}", file=sys.stderr, flush=True)
    text = table(found)
    print(text)
    if given.out is not None:
        parameters = sum(p.numel() for p in model_of(1, torch.float32).parameters())
        figures = {name: {"memory": asdict(a), "course": asdict(b)} for name, (a, b) in found.items()}
        publish(
            given.out, "memory-optimizers", source, report(source, given, text, parameters), {"ways": figures}
        )


if __name__ == "__main__":
    main()
