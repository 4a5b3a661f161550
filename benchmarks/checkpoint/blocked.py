"""How long a save keeps training waiting: ours against `torch.save` and DCP, and against one warm copy.

python -m benchmarks.checkpoint.blocked [--megabytes 1000] [--repeats 5] [--codecs none] [--out DIR]

All ways save the same tensors in turn, round after round in one process; each ends before the next begins.
"""

import argparse
import math
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.race.report import Origin, number, origin, publish
from glm_accelerate.checkpoint.checkpointer import Checkpointer, Save
from glm_accelerate.checkpoint.format import OPTIMIZER, WEIGHTS, Piece

STEPS = 1.0  # seconds of training between the start of a run and its first save: the writer is up by then
LAYERS = 128  # of a vector and a matrix each, three times: weight and both moments

ABOUT = """\
**blocked**: seconds until training may go on and change the tensors. **total**: until everything is written.
**to the copy**: blocked, divided by one copy of the same bytes between two flat buffers touched before, in
the same round. Medians over the rounds; smallest, largest in brackets. Random numbers, all float32.

- `ours`: `Checkpointer`, a copy into shared memory made at the start (`stage`), written by another process,
  hashed and synced. Each round makes a new one: `first` is its first save, a second after the start (in that
  second the writer starts, and would share two cores with the copy), `later` its second.
- `torch.save`: of one dict, as people write it (nothing synced, nothing hashed).
- `dcp.save`, `dcp.async_save`: as shipped, one process, files synced. `cached` keeps its stager's memory; its
  first save in a round, into fresh memory, is shown apart.
"""


@dataclass(frozen=True)
class Timing:
    """One save."""

    blocked: float
    total: float
    bytes: int


@dataclass(frozen=True)
class Round:
    """Each way once."""

    copy: float
    stage: float
    saves: dict[str, Timing]


def state(megabytes: float) -> dict[str, Tensor]:
    """Weights and two moments of a model of many matrices and vectors."""
    side = max(2, math.isqrt(int(megabytes * 1e6 / 4 / 3 / LAYERS)))
    draw = torch.Generator().manual_seed(0)
    made: dict[str, Tensor] = {}
    for layer in range(LAYERS):
        for kind, shape in (("matrix", (side, side - 1)), ("vector", (side,))):
            for moment in ("", "::exp_avg", "::exp_avg_sq"):
                made[f"layers.{layer}.{kind}{moment}"] = torch.randn(shape, generator=draw)
    return made


def groups(tensors: dict[str, Tensor]) -> dict[str, dict[str, Piece]]:
    return {
        group: {name: Piece.whole(tensor) for name, tensor in tensors.items() if ("::" in name) == moments}
        for group, moments in ((WEIGHTS, False), (OPTIMIZER, True))
    }


def size(path: Path) -> int:
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def timed(save: Callable[[], Callable[[], object]], path: Path) -> Timing:
    """`save` returns when training may go on; what it returns waits for the rest."""
    began = time.perf_counter()
    wait = save()
    blocked = time.perf_counter() - began
    wait()
    timing = Timing(blocked, time.perf_counter() - began, size(path))
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return timing


def ours(tensors: dict[str, Tensor], scratch: Path, codec: str) -> tuple[float, Timing, Timing]:
    """Seconds to stage, the first save and a later one."""
    pieces = groups(tensors)
    checkpointer = Checkpointer(scratch, codec=codec)
    began = time.perf_counter()
    checkpointer.stage(pieces)
    staged = time.perf_counter() - began
    time.sleep(STEPS)
    timings: list[Timing] = []
    for step in (1, 2):

        def save(step: int = step) -> Callable[[], object]:
            checkpointer.save(Save(step, 1, pieces, {}, {}, {}))
            return wait

        def wait() -> None:
            while checkpointer.busy():
                time.sleep(0.002)
            for outcome in checkpointer.outcomes():
                if outcome.error:
                    raise SystemExit(outcome.error)

        timings.append(timed(save, scratch / "checkpoints" / f"checkpoint-{step}"))
    checkpointer.close(60)
    return staged, timings[0], timings[1]


def one_round(
    tensors: dict[str, Tensor], buffers: tuple[Tensor, Tensor], scratch: Path, codecs: Sequence[str]
) -> Round:
    began = time.perf_counter()
    buffers[1].copy_(buffers[0])
    copy = time.perf_counter() - began
    saves: dict[str, Timing] = {}
    stage = 0.0
    for codec in codecs:
        name = "ours" if codec == "none" else f"ours, {codec}"
        stage, saves[f"{name}, first"], saves[f"{name}, later"] = ours(tensors, scratch, codec)
    target = scratch / "other"

    def plain() -> Callable[[], object]:
        torch.save(tensors, target)
        return bool

    def sync() -> Callable[[], object]:
        dcp.save(dict(tensors), checkpoint_id=target, no_dist=True)
        return bool

    def behind(stager: DefaultStager) -> Callable[[], Callable[[], object]]:
        def save() -> Callable[[], object]:
            return dcp.async_save(
                dict(tensors), checkpoint_id=target, no_dist=True, async_stager=stager
            ).result

        return save

    saves["torch.save"] = timed(plain, target)
    saves["dcp.save"] = timed(sync, target)
    saves["dcp.async_save"] = timed(
        lambda: dcp.async_save(dict(tensors), checkpoint_id=target, no_dist=True).result, target
    )
    cached = DefaultStager(StagingOptions(False, True, False, False))  # without CUDA: shared memory, kept
    saves["dcp.async_save, cached, first"] = timed(behind(cached), target)
    saves["dcp.async_save, cached, later"] = timed(behind(cached), target)
    cached.close()
    return Round(copy, stage, saves)


def markdown(source: Origin, held: int, tensors: int, rounds: Sequence[Round]) -> str:
    def spread(values: Sequence[float]) -> str:
        return f"{number(median(values))} ({number(min(values))} to {number(max(values))})"

    baseline = median(round_.saves["torch.save"].bytes for round_ in rounds)
    lines = [
        "# Blocked time of a save\n",
        f"- {source.date}; {source.machine}; load when it began {source.load:.1f}",
        f"- `{source.command}`",
        f"- commit {source.commit}",
        "- " + ", ".join(f"{name} {version}" for name, version in source.versions.items()),
        f"- {held / 1e6:,.0f} MB, {tensors} tensors, {torch.get_num_threads()} threads, {len(rounds)} rounds",
        "",
        ABOUT,
        f"One warm copy: {spread([round_.copy for round_ in rounds])} s. "
        f"`stage`, once at the start of a run: {spread([round_.stage for round_ in rounds])} s.\n",
        "| | blocked, s | to the copy | total, s | on disk, MB | to torch.save |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in rounds[0].saves:
        timings = [round_.saves[name] for round_ in rounds]
        ratios = [timing.blocked / round_.copy for timing, round_ in zip(timings, rounds, strict=True)]
        disk = median(timing.bytes for timing in timings)
        lines.append(
            f"| {name} | {spread([timing.blocked for timing in timings])} | {spread(ratios)} "
            f"| {number(median(timing.total for timing in timings))} | {disk / 1e6:,.1f} "
            f"| {disk / baseline:.3f} |"
        )
    return "\n".join(lines) + "\n"


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Blocked time of a save.")
    parser.add_argument("--megabytes", type=float, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--codecs", nargs="+", default=["none"])
    parser.add_argument("--scratch", type=Path, help="where it saves to (default: the temporary directory)")
    parser.add_argument("--out", type=Path, help="directory for the JSON and Markdown; default: only print")
    given = parser.parse_args(words)
    warnings.filterwarnings("ignore", module="torch.distributed")
    source = origin(["python", "-m", "benchmarks.checkpoint.blocked", *words], {"torch": torch.__version__})
    tensors = state(given.megabytes)
    items = sum(tensor.numel() for tensor in tensors.values())
    buffers = (torch.ones(items), torch.ones(items))  # touched
    with tempfile.TemporaryDirectory(dir=given.scratch, prefix="blocked-") as scratch:
        rounds = [one_round(tensors, buffers, Path(scratch), given.codecs) for _ in range(given.repeats)]
    text = markdown(source, items * 4, len(tensors), rounds)
    print(text)
    if given.out is not None:
        figures = {"bytes": items * 4, "rounds": [asdict(round_) for round_ in rounds]}
        publish(given.out, f"checkpoint-blocked-{given.megabytes:g}mb", source, text, figures)


if __name__ == "__main__":
    main(sys.argv[1:])
