"""The result of a race as people read it and as programs do, with what was not equal."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import report
from benchmarks.race.figures import Pair, Row
from benchmarks.report import Origin, number

BASELINE = """\
**The baseline** (`benchmarks/race/stock.py`) is our own re-statement of GLM-4's fine-tune script: HF Trainer
and PEFT, weights in bf16, padding on the left to the longest sample of the batch, logits of all positions and
their loss in fp32, no gradient checkpointing, the library's default AdamW, linear decay from 5e-4 (LoRA) or
5e-5 (full), clipping at 1. LoRA: rank 8, alpha 32, dropout 0.1 on q, k, v. Tokenizing is done before on both
sides, data loader workers are off (faster here than the shipped 16), nothing is saved or evaluated meanwhile.

**Equal**: the weights at the start, the samples of every step and their order, their labels, dropout, rate
and schedule, threads. Both are judged by transformers in fp32 on what they exported.

**Not equal**: ours packs a step's samples into rows where stock pads; the random numbers of dropout and the
adapter's start; in full fine-tuning stock keeps weights and both moments in bf16, ours keeps them in fp32
(which costs ours memory); stock's samples are lists in memory, ours are read from its memory-mapped store;
our operators in C++ are compiled before, as they are once a machine (about ten seconds; processors with
bfloat16 tiles); without them ours compiles in its first step, from an empty cache in every run: a row has it.
"""


@dataclass(frozen=True)
class Heat:
    """One method at one batch size."""

    method: str
    batch: int
    loss_before: float
    pairs: tuple[Pair, ...]
    rows: tuple[Row, ...]


def table(rows: Sequence[Row]) -> str:
    return report.table(
        ("", "stock", "ours", "ours / stock", "smallest to largest"),
        (
            (
                f"{row.name}, {row.unit}" if row.unit else row.name,
                number(row.stock),
                number(row.ours),
                f"{row.ratio:.3f}",
                f"{min(row.ratios):.3f} to {max(row.ratios):.3f}",
            )
            for row in rows
        ),
        left=(0, 4),
    )


def markdown(source: Origin, heats: Sequence[Heat], *, parameters: int, warmup: int, max_tokens: int) -> str:
    parts = [
        BASELINE,
        "Medians of interleaved runs (stock, ours, stock, ours, ...), each in a fresh process. A ratio is",
        "taken between neighbours; the last column is its spread. The first",
        f"{warmup} steps are left out on both sides except where it says otherwise.",
    ]
    for heat in heats:
        steps = len(heat.pairs[0].ours.tokens)
        tokens = sum(heat.pairs[0].ours.tokens)
        of = f"{len(heat.pairs)} runs a side, {steps} steps, {steps * heat.batch} samples, {tokens:,} tokens"
        end = heat.rows[-1]
        fell = f"{heat.loss_before - end.stock:.4f} and {heat.loss_before - end.ours:.4f}"
        parts += [
            f"\n## {heat.method}, batch {heat.batch}\n",
            f"{of}. Held-out loss before training: {heat.loss_before:.4f}; after: stock {end.stock:.4f},",
            f"ours {end.ours:.4f} ({100 * (end.ratio - 1):+.2f} %): it fell by {fell}.\n",
            table(heat.rows),
        ]
    model = f"GLM-4 0414, {parameters / 1e6:.1f} M parameters, random weights; at most {max_tokens:,} tokens"
    return report.page("Race: ours against the stock way", source, [model], *parts)


def as_json(source: Origin, heats: Sequence[Heat]) -> dict[str, Any]:
    return {"origin": asdict(source), "heats": [asdict(heat) for heat in heats]}
