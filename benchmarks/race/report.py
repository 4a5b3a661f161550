"""The result of a race as people read it (Markdown) and as programs do (JSON), with all that is needed to
run it again: date, machine, command, commit, versions, and what was not equal."""

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.race.figures import Pair, Row

ROOT = Path(__file__).resolve().parents[2]

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


@dataclass(frozen=True)
class Origin:
    """Where figures come from."""

    date: str
    machine: str
    load: float
    command: str
    commit: str
    versions: dict[str, str]


def origin(command: Sequence[str], versions: dict[str, str]) -> Origin:
    return Origin(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        machine=machine(),
        load=os.getloadavg()[0],
        command=" ".join(Path(word).name if Path(word).is_absolute() else word for word in command),
        commit=commit(),
        versions={"python": platform.python_version(), **versions},
    )


def publish(out: Path, name: str, source: Origin, text: str, figures: dict[str, Any]) -> None:
    """The Markdown and the JSON of a benchmark, named by its day."""
    out.mkdir(parents=True, exist_ok=True)
    stem = out / f"{source.date[:10]}-{name}"
    stem.with_suffix(".md").write_text(text, encoding="utf-8")
    said = {"origin": asdict(source), **figures}
    stem.with_suffix(".json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB memory"


def commit() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    name = git("rev-parse", "HEAD") or "none"
    changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results")  # what was measured before
    return name + (" with uncommitted changes" if changed else "")


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def table(rows: Sequence[Row]) -> str:
    lines = ["| | stock | ours | ours / stock | smallest to largest |", "| --- | ---: | ---: | ---: | --- |"]
    for row in rows:
        unit = f", {row.unit}" if row.unit else ""
        spread = f"{min(row.ratios):.3f} to {max(row.ratios):.3f}"
        figures = f"{number(row.stock)} | {number(row.ours)} | {row.ratio:.3f} | {spread}"
        lines.append(f"| {row.name}{unit} | {figures} |")
    return "\n".join(lines)


def markdown(source: Origin, heats: Sequence[Heat], *, parameters: int, warmup: int, max_tokens: int) -> str:
    parts = [
        "# Race: ours against the stock way\n",
        f"- {source.date}; {source.machine}; load when it began {source.load:.1f}",
        f"- `{source.command}`",
        f"- commit {source.commit}",
        "- " + ", ".join(f"{name} {version}" for name, version in source.versions.items()),
        f"- GLM-4 0414, {parameters / 1e6:.1f} M parameters, random weights; at most {max_tokens:,} tokens\n",
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
    return "\n".join(parts) + "\n"


def as_json(source: Origin, heats: Sequence[Heat]) -> dict[str, Any]:
    return {"origin": asdict(source), "heats": [asdict(heat) for heat in heats]}
