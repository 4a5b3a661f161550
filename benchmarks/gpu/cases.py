"""The training jobs that are measured on a GPU, ours and the stock way's, on the same samples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from benchmarks.gpu.model import GLM_4_9B_0414, TINY
from benchmarks.race.samples import Tokens

Side = Literal["ours", "stock"]
WARMUP, MEASURED = 2, 6  # steps
TINY_STEPS = (1, 2)


@dataclass(frozen=True)
class Case:
    """One job. Both sides learn the same samples in the same steps; stock takes `batch` of them at a time,
    padded to the longest, and ours as many rows of `row` tokens as they fill.
    """

    name: str
    about: str
    row: int
    samples: int  # a step
    batch: int
    fixed: tuple[int, int] | None = None  # tokens of every prompt and answer; None: lengths as people write
    method: Literal["lora", "full"] = "lora"
    base: Literal["bfloat16", "nf4"] = "bfloat16"
    fp8: bool = False
    all: bool = False  # adapters in every linear layer, not only where stock has them
    layers: int = 40
    recompute: tuple[bool, ...] = (True, False)
    beside: str = ""  # the case whose stock side it is compared with, if not its own
    seconds: int = 150  # that a side may take

    @property
    def sides(self) -> tuple[Side, ...]:
        return ("ours",) if self.beside else ("ours", "stock")


CASES = (
    Case("lora-4096", "LoRA, packed rows of 4,096 tokens", 4096, 32, 4),
    Case("lora-6000", "LoRA, 3,500 tokens in and 2,500 out", 6016, 4, 1, fixed=(3500, 2500)),
    Case("lora-1024", "LoRA, one sample of 1,024 tokens a step", 1024, 1, 1, fixed=(512, 512)),
    Case("qlora", "QLoRA (nf4), packed rows of 4,096 tokens", 4096, 32, 4, base="nf4"),
    Case(
        "full",
        "full fine-tuning of 24 of the 40 layers (40 in float32 with AdamW are 150 GB)",
        4096,
        32,
        4,
        method="full",
        layers=24,
        recompute=(True,),
    ),
    Case(
        "lora-all",
        "LoRA on all linear layers, packed rows of 4,096",
        4096,
        32,
        4,
        all=True,
        beside="lora-4096",
    ),
    Case("fp8", "LoRA with 8-bit products, packed rows of 4,096", 4096, 32, 4, fp8=True, beside="lora-4096"),
)


def shrunk(case: Case) -> Case:
    """The same, for a CPU and seconds."""
    fixed = None if case.fixed is None else (35, 25)
    return replace(case, row=128, samples=6, batch=min(case.batch, 2), fixed=fixed, layers=2)


def config_of(case: Case, tiny: bool) -> dict[str, Any]:
    return (TINY if tiny else GLM_4_9B_0414) | {"num_hidden_layers": case.layers}


def steps_of(case: Case, tiny: bool) -> list[list[Tokens]]:
    """The samples of every step. Lengths have a long tail (median 250, a tenth above 900, the row at most),
    and the answer is the last fifth to four fifths.
    """
    draw = np.random.default_rng(0)
    typical, spread, least = (20, 0.8, 6) if tiny else (250, 1.0, 24)
    vocabulary = config_of(case, tiny)["vocab_size"]

    def sample() -> Tokens:
        if case.fixed is not None:
            prompt, answer = case.fixed
            length = prompt + answer
        else:
            length = int(np.clip(draw.lognormal(np.log(typical), spread), least, case.row))
            prompt = length - max(1, round(length * draw.uniform(0.2, 0.8)))
        tokens = draw.integers(3, vocabulary, length).astype(np.int32)
        return Tokens(tokens, np.arange(length) >= prompt)

    count = sum(TINY_STEPS) if tiny else WARMUP + MEASURED
    return [[sample() for _ in range(case.samples)] for _ in range(count)]


def peak_seconds(tiny: bool) -> float:
    """For how long the device's best is looked for."""
    return 0.0 if tiny else 1.0


def warmup(tiny: bool) -> int:
    return TINY_STEPS[0] if tiny else WARMUP


def figures_of(
    steps: Sequence[Sequence[Tokens]],
    seconds: Sequence[float],
    flops: Callable[[Sequence[Tokens]], float],
    skipped: int,
) -> dict[str, Any]:
    """What both sides report, from the seconds of every step."""
    counted = list(zip(steps, seconds, strict=True))[skipped:]
    taken = sum(each for _, each in counted)
    tokens = sum(len(sample.tokens) for step, _ in counted for sample in step)
    return {
        "tokens": tokens,
        "targets": sum(int(sample.targets[1:].sum()) for step, _ in counted for sample in step),
        "seconds": list(seconds),
        "tokens_per_second": tokens / taken,
        "flops_per_second": sum(flops(step) for step, _ in counted) / taken,
    }
