"""Sharing and low rank: what they save, what they cost in held-out loss, and what training brings back.

python -m benchmarks.memory.structure --data TRAIN.jsonl DEV.jsonl [--steps 200] [--recovery 200] [--out DIR]

A random GLM-4 of the race's shape is first trained on the data. From there each variant goes on in a process
of its own, on the same samples: plain, with shared projections, with factored matrices, with both.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.memory.tracked import allocations, borrowed, most_between
from benchmarks.race.job import memory_now, memory_peak
from benchmarks.race.prepare_model import SMALL, TINY, WORDS, prepare_model
from benchmarks.race.report import Origin, number, origin, publish
from glm_accelerate.assemble.model import open_model
from glm_accelerate.config.schema import AdaptSection, RunConfig
from glm_accelerate.data.inputs import open_inputs
from glm_accelerate.data.pipeline import batches
from glm_accelerate.data.types import Step
from glm_accelerate.evaluate.measuring.examine import choice_of
from glm_accelerate.evaluate.measuring.losses import held_out_loss
from glm_accelerate.export.export import export
from glm_accelerate.kernels.compiled import missing
from glm_accelerate.models.adapt import adapt
from glm_accelerate.models.adapt.sharing import SHARED
from glm_accelerate.models.adapt.structure import structure_of
from glm_accelerate.models.attention import Attention
from glm_accelerate.models.bind import bind_operators
from glm_accelerate.models.decoder import Decoder
from glm_accelerate.models.weights import load_model
from glm_accelerate.observe.events import Event
from glm_accelerate.optim.build import build_optimizer
from glm_accelerate.optim.one_pass import keep_copies
from glm_accelerate.train.build import Built
from glm_accelerate.train.run import train
from glm_accelerate.train.step import update

Said = dict[str, Any]

ABOUT = """\
**before** is the held-out loss of the trained model, **just after** that of the variant before its first
step, then after each part of the recovery run; the plain model trains on as well, so the last columns
compare. **tensors**: the most bytes of tensors alive in a step of four held-out samples (every allocation
of torch, from its profiler): weights, gradients, both moments, activations. **process**: the most that was
resident in a step of the run (VmHWM) above what Python, torch and our modules take before anything is
loaded. **saved**: to the plain model's. **logits**: the largest difference between the trained model and
its expanded export as transformers opens it, both in float32, as a share of the largest logit.
**reopened**: whether the export as it is gives the very same logits.
"""


@dataclass(frozen=True)
class Measured:
    """One variant's run."""

    name: str
    parameters: int
    factored: int
    losses: dict[int, float]
    tensors: int
    peak: int
    off: float  # logits
    reopened: bool
    seconds: float


class Peak:
    """The loop sets the high-water mark back at each step, so it is read at each."""

    def __init__(self) -> None:
        self.bytes = 0

    def observe(self, event: Event) -> None:
        if event["kind"] == "step":
            self.bytes = max(self.bytes, memory_peak())

    def close(self) -> None:
        pass


def config_of(given: argparse.Namespace, work: Path, adapted: Said | None) -> Said:
    """Of the first training, or (`adapted`) of what goes on from it, on other samples."""
    first = adapted is None
    steps = given.steps if first else given.recovery
    train_file, dev_file = given.data
    return {
        "model": {"path": str(work / ("model" if first else "base")), "dtype": "float32"},
        "adapt": {"method": "full", **(adapted or {})},
        "data": {
            "train": str(train_file),
            "dev": str(dev_file),
            "max_tokens": given.max_tokens,
            "cache": str(work / "cache"),
        },
        "train": {"steps": steps, "step_samples": given.batch, "seed": int(not first)},
        "precision": {"compile": "on" if missing("cpu") is None else "off"},
        "optim": {"learning_rate": 1e-3 if first else 3e-4},
        "evaluate": {"every": max(1, steps // 2), "samples": given.heldout},
        "checkpoint": {"every": steps, "keep_best": 0},
    }


# --- One run, started as `... side CONFIG RUN RESULT`. ---


def side(config_file: Path, run: Path, result_file: Path) -> None:
    config = RunConfig.model_validate(json.loads(config_file.read_text()))
    before, peak, kept = memory_now(), Peak(), list[Built]()
    result = train(config, run, observers=[peak], on_built=kept.append)
    model = kept.pop().run.model
    said = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "factored": len(structure_of(model).ranks),
        "losses": result.losses,
        "tensors": alive(config),
        "peak": peak.bytes - before,
        "seconds": result.seconds,
    }
    result_file.write_text(json.dumps(said))


def alive(config: RunConfig) -> int:
    """The most bytes of tensors in a step after the first, of four held-out samples."""
    directory, device = Path(config.model.path), torch.device("cpu")
    inputs = open_inputs(config.data, directory)
    assert inputs.dev is not None
    packed = tuple(batches(inputs.dev, range(4), "pack", 2048))
    sums = sum(batch.tokens for batch in packed), sum(batch.targets for batch in packed)
    step = Step(1, 0, packed, (), *sums)
    with borrowed() as loans, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model = load_model(directory, dtype=torch.float32)
        model.compute = torch.bfloat16
        adapt(model, config.adapt)
        bind_operators(model.train(), compiled=config.precision.compile == "on")
        native = model.form == "native"
        optimizer = build_optimizer(model.named_parameters(), config.optim, native=native)
        keep_copies(optimizer, model)
        update(model, optimizer, step, device, learning_rate=1e-4, limit=1.0)
        begin = time.time_ns()
        update(model, optimizer, step, device, learning_rate=1e-4, limit=1.0)
    return most_between(allocations(seen) + loans, begin)


def trained(config: Said, run: Path) -> Said:
    files = run.with_suffix(".config.json"), run.with_suffix(".result.json")
    files[0].write_text(json.dumps(config))
    words = [sys.executable, "-m", "benchmarks.memory.structure", "side", files[0], run, files[1]]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{run.name} ended with code {done.returncode}\n{done.stderr[-3000:]}")
    said: Said = json.loads(files[1].read_text())
    said["losses"] = {int(step): loss for step, loss in said["losses"].items()}
    return said


# --- What was exported. ---


@torch.no_grad()
def exported(run: Path, out: Path, tokens_1T: Tensor) -> tuple[float, bool]:
    """How far the logits of transformers are off, and whether the export as it is gives the same ones."""
    from transformers import AutoModelForCausalLM

    ours = open_model(run, dtype=torch.float32).model(tokens_1T)
    export(run, out / "plain", merge_adapter=False, dtype=torch.float32)
    export(run, out / "as-is", merge_adapter=False, dtype=torch.float32, layout="structured")
    theirs = AutoModelForCausalLM.from_pretrained(out / "plain", dtype=torch.float32).eval()(tokens_1T).logits
    again = load_model(out / "as-is", dtype=torch.float32).eval()(tokens_1T)
    return float((ours - theirs).abs().max() / ours.abs().max()), torch.equal(ours, again)


# --- With what a group of layers begins. ---


def starts(config: RunConfig, share: int) -> dict[str, float]:
    """Held-out loss right after sharing, for each way to make one projection of several."""
    directory = Path(config.model.path)
    inputs = open_inputs(config.data, directory)
    assert inputs.dev is not None
    chosen = choice_of(inputs.dev).order[: int(config.evaluate.samples)].tolist()  # as the runs do
    held: dict[str, float] = {}
    for name in ("each its own", "first", "last", "mean", "mean, turned to the first"):
        model = load_model(directory, dtype=torch.float32)
        plain = attentions(load_model(directory, dtype=torch.float32))
        if name != "each its own":
            adapt(model, AdaptSection(method="full", share_qk=share))
            begin(model, plain, share, name)
        found = held_out_loss(model, batches(inputs.dev, chosen, "pack", 2048))
        held[name] = found.mean
    return held


def attentions(model: Decoder) -> list[Attention]:
    return [part for part in model.modules() if isinstance(part, Attention)]


@torch.no_grad()
def begin(model: Decoder, plain: Sequence[Attention], share: int, name: str) -> None:
    """Fill what each group shares from the layers as they were."""
    for first in range(0, len(plain), share):
        group = list(plain[first : first + share])
        if name == "mean, turned to the first":
            for other in group[1:]:
                turn(other, group[0])
        for leaf in SHARED:
            place = model.get_submodule(f"layers.{first}.self_attn.{leaf}")
            theirs = [attention.get_submodule(leaf) for attention in group]
            for kind, parameter in place.named_parameters():
                held = torch.stack([layer.get_parameter(kind) for layer in theirs])
                parameter.copy_({"first": held[0], "last": held[-1]}.get(name, held.mean(0)))


def turn(attention: Attention, to: Attention) -> None:
    """Rotate the heads' coordinates, which changes no score, so that a layer's queries and keys lie next to
    another's: pairs of rotary dimensions by an angle each, the others by an orthogonal matrix (Procrustes).
    """
    D, width = attention.head_width, attention.q_proj.inputs
    mine, theirs = (
        [(a.q_proj, a.k_proj)[i].weight.view(-1, D, width) for i in (0, 1)] for a in (attention, to)
    )
    for head in range(len(mine[1])):
        rows = slice(head * attention.groups, (head + 1) * attention.groups)
        own_HDI = torch.cat([mine[0][rows], mine[1][head : head + 1]])
        wanted_HDI = torch.cat([theirs[0][rows], theirs[1][head : head + 1]])
        cross_DD = torch.einsum("hdi,hei->de", wanted_HDI, own_HDI)
        turn_DD = torch.zeros(D, D)
        for pair in range(0, D // 2, 2):
            block = cross_DD[pair : pair + 2, pair : pair + 2]
            angle = torch.atan2(block[1, 0] - block[0, 1], block[0, 0] + block[1, 1])
            turn_DD[pair : pair + 2, pair : pair + 2] = torch.stack(
                [torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])]
            )
        left, _, right = torch.linalg.svd(cross_DD[D // 2 :, D // 2 :])
        turn_DD[D // 2 :, D // 2 :] = left @ right
        for layer, heads in ((attention.q_proj, range(rows.start, rows.stop)), (attention.k_proj, [head])):
            for one in heads:
                part = slice(one * D, (one + 1) * D)
                layer.weight[part] = turn_DD @ layer.weight[part]
                if layer.bias is not None:
                    layer.bias[part] = turn_DD @ layer.bias[part]


# --- The report. ---


def markdown(
    source: Origin, given: argparse.Namespace, losses: dict[int, float], held: Said, rows: Sequence[Measured]
) -> str:
    plain = rows[0]
    last = list(plain.losses)[1:]
    lines = [
        "# Shared and factored matrices\n",
        f"- {source.date}; {source.machine}; load when it began {source.load:.1f}",
        f"- `{source.command}`",
        f"- commit {source.commit}",
        "- " + ", ".join(f"{name} {version}" for name, version in source.versions.items()),
        f"- GLM-4 0414, {plain.parameters / 1e6:.1f} M parameters; {given.steps} steps of {given.batch} "
        f"samples (held-out loss {losses[0]:.3f} to {losses[given.steps]:.3f}), then {given.recovery}\n",
        ABOUT,
        "| | parameters | saved | tensors, MB | saved | process, MB | saved | before | just after | "
        + " | ".join(f"{step} steps" for step in last)
        + " | logits | reopened |",
        "| --- |" + " ---: |" * (10 + len(last)),
    ]
    for row in rows:
        fell = " | ".join(f"{row.losses[step]:.3f}" for step in last)
        lines.append(
            f"| {row.name} | {row.parameters:,} | {1 - row.parameters / plain.parameters:.1%} "
            f"| {row.tensors / 1e6:,.0f} | {1 - row.tensors / plain.tensors:.1%} "
            f"| {row.peak / 1e6:,.0f} | {1 - row.peak / plain.peak:.1%} "
            f"| {plain.losses[0]:.3f} | {row.losses[0]:.3f} | {fell} | {row.off:.1e} "
            f"| {'equal' if row.reopened else 'NOT equal'} |"
        )
    lines += [
        f"\nWith what {given.share} layers that share projections may begin (held-out loss just after):\n",
        "| start | loss |",
        "| --- | ---: |",
        *(f"| {name} | {number(loss)} |" for name, loss in held.items()),
    ]
    return "\n".join(lines) + "\n"


def arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What sharing and low rank save, and what they cost.")
    parser.add_argument("--data", type=Path, nargs=2, required=True, metavar=("TRAIN", "DEV"))
    parser.add_argument("--steps", type=int, default=200, help="before the surgery")
    parser.add_argument("--recovery", type=int, default=200, help="steps after it")
    parser.add_argument("--share", type=int, default=2)
    parser.add_argument("--energy", type=float, default=0.7)
    parser.add_argument("--batch", type=int, default=4, help="samples in a step")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--heldout", type=int, default=64)
    parser.add_argument("--tiny", action="store_true", help="a model for tests")
    parser.add_argument("--out", type=Path, help="directory for the JSON and Markdown; default: only print")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> None:
    given = arguments(words)
    given.data = [path.resolve() for path in given.data]
    source = origin(["python", "-m", "benchmarks.memory.structure", *words], {"torch": torch.__version__})
    variants: dict[str, Said] = {
        "plain": {},
        f"shared by {given.share}": {"share_qk": given.share},
        f"energy {given.energy:g}": {"keep_energy": given.energy},
        "both": {"share_qk": given.share, "keep_energy": given.energy},
    }
    rows: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="structure-") as folder:
        work = Path(folder)
        prepare_model(given.data[0], work / "model", WORDS, shape=TINY if given.tiny else SMALL)
        begun = trained(config_of(given, work, None), work / "begun")
        export(work / "begun", work / "base", merge_adapter=False, dtype=torch.float32)
        held = starts(RunConfig.model_validate(config_of(given, work, {})), given.share)
        tokens_1T = torch.randint(0, WORDS // 2, (1, 200), generator=torch.Generator().manual_seed(0))
        for name, adapted in variants.items():
            run = work / name.replace(" ", "-")
            said = trained(config_of(given, work, adapted), run)
            off, reopened = exported(run, work / f"out-{len(rows)}", tokens_1T)
            rows.append(Measured(name=name, off=off, reopened=reopened, **said))
            print(rows[-1], file=sys.stderr, flush=True)
    text = markdown(source, given, begun["losses"], held, rows)
    print(text)
    if given.out is not None:
        figures = {"begun": begun, "starts": held, "variants": [asdict(row) for row in rows]}
        publish(given.out, "memory-structure", source, text, figures)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if sys.argv[1:2] == ["side"]:
        side(*(Path(word) for word in sys.argv[2:5]))
    else:
        main(sys.argv[1:])
