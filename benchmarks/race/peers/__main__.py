"""Ours against the peers that train on a CPU, each in an environment of its own, in turn; one report.

python -m benchmarks.race.peers --data TRAIN.jsonl DEV.jsonl --envs DIR [--method lora] [--repeats 5]

DIR is what `install.sh` made; a peer that is not in it is left out, by name.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.child import run, write
from benchmarks.race.job import Job, Method
from benchmarks.race.peers.report import PEERS, Race, Run, markdown, ratios
from benchmarks.race.race import Setting, judge, model_for, one_side, say
from benchmarks.report import ROOT, origin, publish

BATCH = 4  # samples in a step, and about as many in a packed row of
MAX_TOKENS = 1024


def drawn(job: Job, setting: Setting, work: Path) -> tuple[Job, Path]:
    """The peers' job, whose data are the conversations of the race, and the held-out samples."""
    job_file, heldout, text = work / "samples.job.json", work / "heldout.npz", work / "conversations.jsonl"
    write(job_file, job)
    run("benchmarks.race.draw", job_file, setting.dev, heldout, setting.heldout, threads=setting.threads)
    run("benchmarks.race.peers.conversations", job_file, text, threads=setting.threads)
    return replace(job, data=str(text)), heldout


def one_run(side: str, ours: Job, peers: Job, work: Path, heldout: Path, envs: Path) -> Run:
    load = os.getloadavg()[0]
    if side == "ours":
        return Run(*one_side(side, ours, work, heldout), load)
    scratch = work / f"scratch-{side}"
    shutil.rmtree(scratch, ignore_errors=True)
    job = replace(peers, cache=str(scratch))
    python = envs / side / "bin" / "python"
    return Run(*one_side(side, job, work, heldout, f"peers.run_{side}", python), load)


def race(setting: Setting, envs: Path, work: Path, out: Path, command: Sequence[str]) -> None:
    """All repeats. The report is written after each, so a failure later loses nothing."""
    method = setting.methods[0]
    present = [peer for peer in PEERS if (envs / peer / "bin" / "python").exists()]
    absent = [peer for peer in PEERS if peer not in present]
    source = origin(command, {})
    model, parameters = model_for(setting, work)
    ours = Job(
        model=str(model),
        data=str(setting.train),
        train=str(work / "train.npz"),
        cache=str(work / "cache"),
        export="",
        method=method,
        batch=BATCH,
        steps=setting.steps,
        max_tokens=setting.max_tokens,
        seed=setting.seed,
        threads=setting.threads,
    )
    peers, heldout = drawn(ours, setting, work)
    before = judge(model, model, heldout, work, setting.threads)
    runs: dict[str, list[Run]] = {side: [] for side in ("ours", *present)}
    for repeat in range(setting.repeats):
        for side, done in runs.items():
            done.append(one_run(side, ours, peers, work, heldout, envs))
            say(f"{method} {repeat + 1}/{setting.repeats} {side}: load {done[-1].load:.1f} before")
        weights = (model / "model.safetensors").stat().st_size
        so_far = Race(method, BATCH, setting.warmup, before, parameters, weights, absent, runs)
        publish(out, f"race-peers-{method}", source, markdown(source, so_far), asdict(so_far))
        say(ratios(so_far))


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.race.peers", description=__doc__)
    parser.add_argument("--data", type=Path, nargs=2, metavar=("TRAIN", "DEV"), required=True)
    parser.add_argument(
        "--envs", type=Path, required=True, help="one virtual environment a peer, by its name"
    )
    parser.add_argument("--method", choices=("lora", "full"), default="lora")
    parser.add_argument("--steps", type=int, default=16, help="of each run")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each side")
    parser.add_argument("--warmup", type=int, default=3, help="first steps left out on all sides alike")
    parser.add_argument("--heldout", type=int, default=60, help="samples that the judge reads")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, help="keep model, tokens and logs here (default: nowhere)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args(words)
    if given.warmup >= given.steps:
        parser.error("--warmup has to be smaller than --steps")
    return given


def main(words: Sequence[str]) -> None:
    given = parse(words)
    method: Method = given.method
    setting = Setting(
        train=given.data[0].resolve(),
        dev=given.data[1].resolve(),
        methods=(method,),
        batches=(BATCH,),
        steps=given.steps,
        repeats=given.repeats,
        warmup=given.warmup,
        max_tokens=MAX_TOKENS,
        vocab=8_000,
        heldout=given.heldout,
        seed=0,
        threads=given.threads,
        tiny=False,
    )
    with ExitStack() as stack:
        work: Path = given.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="race-")))
        work = work.resolve()
        work.mkdir(parents=True, exist_ok=True)
        command = ["python", "-m", "benchmarks.race.peers", *words]
        race(setting, given.envs.resolve(), work, given.out, command)


if __name__ == "__main__":
    main(sys.argv[1:])
