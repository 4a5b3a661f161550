"""Losses and gradient norms of our trainer on N ranks, against DeepSpeed's ZeRO-3 on transformers' model.

DS_ACCELERATOR=cpu DS_BUILD_OPS=0 pip install --no-deps --no-build-isolation --target DIR \\
    deepspeed==0.19.8 hjson py-cpuinfo einops msgpack
PYTHONPATH=DIR python -m benchmarks.ranks.deepspeed_oracle [--ranks 2 4] [--steps 20] [--out DIR]
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.race.report import Origin, origin, publish
from glm_accelerate.demo.show import write_all
from glm_accelerate.observe.events import read_events

Said = list[tuple[float, float]]  # loss and gradient norm of each step

CONTROL = 1.001  # DeepSpeed's rate times this has to be seen
SETTINGS = [
    "adapt.method=full",
    "precision.compute=float32",
    "train.step_samples=8",
    "optim.learning_rate=1e-3",
    "optim.weight_decay=0.1",
    "optim.schedule=constant",
    "optim.warmup=0",
    "optim.clip=1.0",
    "evaluate.metrics=[loss]",
]

ABOUT = """\
**ours**: `train --nproc N`, full fine-tuning divided by FSDP2, rows packed. **DeepSpeed**: ZeRO-3 with
transformers' `Glm4ForCausalLM`, eager attention, torch's AdamW, one padded batch a rank. The same weights at
the start, the same samples in the same step, float32, decay 0.1 on matrices, clipping at 1, gloo on the CPU.
Figures are the largest relative difference over all steps: of the loss, and of the gradient norm before
clipping. The control is DeepSpeed with a learning rate one thousandth too high: what this comparison can see.
"""


@dataclass(frozen=True)
class Row:
    """Two ways through the same steps."""

    one: str
    other: str
    loss: float
    norm: float


def ours(config: Path, settings: Sequence[str], ranks: int, work: Path) -> Said:
    run = work / f"ours-{ranks}"
    words = ["train", str(config), *settings, "--run", str(run), "--nproc", str(ranks)]
    done = subprocess.run(
        [sys.executable, "-m", "glm_accelerate.cli.main", *words], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"ours, {ranks} ranks: exit code {done.returncode}\n{done.stderr}")
    steps = [event for event in read_events(run / "events.jsonl") if event["kind"] == "step"]
    return [(float(str(event["loss"])), float(str(event["grad_norm"]))) for event in steps]


def deepspeed(config: Path, settings: Sequence[str], ranks: int, work: Path, faster: float = 1.0) -> Said:
    out = work / f"deepspeed-{ranks}-{faster}.json"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [sys.executable, "-m", "benchmarks.ranks.deepspeed_rank", str(config), str(out), str(faster)]
    where = {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    jobs: list[subprocess.Popen[str]] = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        jobs.append(
            subprocess.Popen(
                [*line, *settings],
                env={**os.environ, **where, **place},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    complaints = [job.communicate()[1] for job in jobs]
    for rank, job in enumerate(jobs):
        if job.returncode != 0:
            said = complaints[rank][-2000:]
            raise SystemExit(f"DeepSpeed, rank {rank}: exit code {job.returncode}\n{said}")
    return [(loss, norm) for loss, norm in json.loads(out.read_text())]


def compare(one: str, other: str, said: dict[str, Said]) -> Row:
    pairs = list(zip(said[one], said[other], strict=True))
    loss, norm = (max(abs(a[part] - b[part]) / abs(b[part]) for a, b in pairs) for part in (0, 1))
    return Row(one, other, loss, norm)


def run_all(given: argparse.Namespace, work: Path) -> tuple[dict[str, Said], list[Row]]:
    write_all(work / "demo", given.steps)
    config = work / "demo" / "config.yaml"
    steps = [f"{key}={given.steps}" for key in ("train.steps", "checkpoint.every", "evaluate.every")]
    settings = [*SETTINGS, *steps]
    said = {"ours, 1": ours(config, settings, 1, work)}
    rows: list[Row] = []
    for ranks in given.ranks:
        said[f"ours, {ranks}"] = ours(config, settings, ranks, work)
        said[f"DeepSpeed, {ranks}"] = deepspeed(config, settings, ranks, work)
        rows += [
            compare(f"DeepSpeed, {ranks}", f"ours, {ranks}", said),
            compare(f"DeepSpeed, {ranks}", "ours, 1", said),
            compare(f"ours, {ranks}", "ours, 1", said),
        ]
    ranks = given.ranks[0]
    said[f"control, {ranks}"] = deepspeed(config, settings, ranks, work, CONTROL)
    return said, [*rows, compare(f"control, {ranks}", f"ours, {ranks}", said)]


def markdown(source: Origin, said: dict[str, Said], rows: Sequence[Row]) -> str:
    first, last = said["ours, 1"][0], said["ours, 1"][-1]
    clipped = sum(norm > 1.0 for _, norm in said["ours, 1"])
    lines = [
        "# Our ranks against DeepSpeed's\n",
        f"- {source.date}; {source.machine}",
        f"- `{source.command}`",
        f"- commit {source.commit}",
        "- " + ", ".join(f"{name} {version}" for name, version in source.versions.items()),
        f"- {len(said['ours, 1'])} steps, {clipped} of them clipped; loss {first[0]:.4f} to {last[0]:.4f}\n",
        ABOUT,
        "| | against | loss | gradient norm |",
        "| --- | --- | ---: | ---: |",
        *(f"| {row.one} | {row.other} | {row.loss:.1e} | {row.norm:.1e} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Our ranks against DeepSpeed's ZeRO-3.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, help="directory for the JSON and Markdown; default: only print")
    given = parser.parse_args(words)
    try:
        versions = {name: version(name) for name in ("torch", "transformers", "deepspeed")}
    except PackageNotFoundError as error:
        cure = f"the head of {Path(__file__).name} says how to install it aside"
        raise SystemExit(f"{error}: {cure}") from error
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    source = origin(["python", "-m", "benchmarks.ranks.deepspeed_oracle", *words], versions)
    with tempfile.TemporaryDirectory(prefix="oracle-") as folder:
        said, rows = run_all(given, Path(folder))
    text = markdown(source, said, rows)
    print(text)
    if given.out is not None:
        figures = {"said": said, "rows": [asdict(row) for row in rows]}
        publish(given.out, "ranks-deepspeed", source, text, figures)


if __name__ == "__main__":
    main(sys.argv[1:])
