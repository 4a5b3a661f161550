"""Ours against the stock way on the same samples in the same steps: interleaved runs, medians, one report.

python -m benchmarks.race.race --data TRAIN.jsonl DEV.jsonl [--method both] [--batch 4 1] [--repeats 5]

Every run is a process of its own (this one imports neither torch nor transformers), so no side inherits
warm caches, threads or memory.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.child import result, run, write
from benchmarks.race.figures import Pair, rows
from benchmarks.race.job import Job, Method, Result, Side
from benchmarks.race.report import Heat, as_json, markdown, table
from benchmarks.report import ROOT, Origin, origin

SIDES: tuple[Side, Side] = ("stock", "ours")


@dataclass(frozen=True)
class Setting:
    """Of the command line."""

    train: Path
    dev: Path
    methods: tuple[Method, ...]
    batches: tuple[int, ...]
    steps: int
    repeats: int
    warmup: int
    max_tokens: int
    vocab: int
    heldout: int
    seed: int
    threads: int
    tiny: bool


def one_side(
    side: Side, job: Job, work: Path, heldout: Path, module: str = "", python: str | Path = sys.executable
) -> tuple[Result, float]:
    """Train, then have the export judged; the export is not kept. `module`: if it has not the side's name."""
    export, compiled = work / f"export-{side}", work / "compiled"
    for folder in (export, compiled):  # no run profits from what another compiled
        shutil.rmtree(folder, ignore_errors=True)
    trained = result(
        f"benchmarks.race.{module or side}",
        replace(job, export=str(export)),
        Result,
        work,
        threads=job.threads,
        environment={"TORCHINDUCTOR_CACHE_DIR": str(compiled)},
        python=python,
    )
    return trained, judge(Path(job.model), export, heldout, work, job.threads)


def judge(model: Path, export: Path, heldout: Path, work: Path, threads: int) -> float:
    out = work / "loss.json"
    run("benchmarks.race.judge", model, export, heldout, out, threads=threads)
    return float(json.loads(out.read_text())["loss"])


def heat(setting: Setting, method: Method, batch: int, model: Path, work: Path) -> Heat:
    """All repeats of one method at one batch size."""
    heldout = work / "heldout.npz"
    job = Job(
        model=str(model),
        data=str(setting.train),
        train=str(work / "train.npz"),
        cache=str(work / "cache"),
        export="",
        method=method,
        batch=batch,
        steps=setting.steps,
        max_tokens=setting.max_tokens,
        seed=setting.seed,
        threads=setting.threads,
    )
    job_file = work / "samples.job.json"
    write(job_file, job)
    run("benchmarks.race.draw", job_file, setting.dev, heldout, setting.heldout, threads=setting.threads)
    before = judge(model, model, heldout, work, setting.threads)
    pairs: list[Pair] = []
    for repeat in range(setting.repeats):
        (stock, stock_loss), (ours, ours_loss) = (one_side(side, job, work, heldout) for side in SIDES)
        pairs.append(Pair(stock, ours, stock_loss, ours_loss))
        speed = rows(pairs[-1:], setting.warmup, 0)[0]
        say(f"{method} batch {batch}, {repeat + 1}/{setting.repeats}: {speed.ratio:.2f}x by wall clock")
    weights = (model / "model.safetensors").stat().st_size
    return Heat(method, batch, before, tuple(pairs), tuple(rows(pairs, setting.warmup, weights)))


def model_for(setting: Setting, work: Path) -> tuple[Path, int]:
    """The directory of the model, made if it is not there, and how many parameters it has."""
    model = work / f"model-{setting.vocab}{'-tiny' if setting.tiny else ''}"
    if not (model / "made.json").exists():
        tiny = ("--tiny",) if setting.tiny else ()
        words = ("--data", setting.train, "--out", model, "--vocab", setting.vocab, *tiny)
        run("benchmarks.race.prepare_model", *words, threads=setting.threads)
    return model, int(json.loads((model / "made.json").read_text())["parameters"])


def race(setting: Setting, work: Path, out: Path, source: Origin) -> None:
    """Every heat of the race. The report is written after each, so a failure later loses nothing."""
    model, parameters = model_for(setting, work)
    heats: list[Heat] = []
    for method in setting.methods:
        for batch in setting.batches:
            heats.append(heat(setting, method, batch, model, work))
            versions = {**source.versions, **heats[0].pairs[0].stock.versions}
            full = replace(source, versions=versions)
            text = markdown(
                full, heats, parameters=parameters, warmup=setting.warmup, max_tokens=setting.max_tokens
            )
            out.parent.mkdir(parents=True, exist_ok=True)
            out.with_name(out.name + ".md").write_text(text)
            out.with_name(out.name + ".json").write_text(json.dumps(as_json(full, heats), indent=1) + "\n")
            say(table(heats[-1].rows))
    say(f"written: {out}.md and .json")


def say(line: str) -> None:
    print(line, flush=True)


def parse(words: Sequence[str]) -> tuple[Setting, Path | None, Path | None]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.race.race", description=__doc__)
    parser.add_argument("--data", type=Path, nargs=2, metavar=("TRAIN", "DEV"), required=True)
    parser.add_argument("--method", choices=("lora", "full", "both"), default="both")
    parser.add_argument("--batch", type=int, nargs="+", default=[4, 1], help="samples in a step")
    parser.add_argument("--steps", type=int, default=30, help="of each run")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each side")
    parser.add_argument("--warmup", type=int, default=3, help="first steps left out on both sides alike")
    parser.add_argument("--max-tokens", type=int, default=1024, help="longest sample")
    parser.add_argument("--vocab", type=int, default=8_000, help="8000, or 151552 as GLM-4 has")
    parser.add_argument("--heldout", type=int, default=64, help="samples that the judge reads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a model of 30 thousand parameters: for tests")
    parser.add_argument("--work", type=Path, help="keep model, tokens and logs here (default: nowhere)")
    parser.add_argument(
        "--out", type=Path, help="results, without ending (default: benchmarks/results/race-DATE)"
    )
    given = parser.parse_args(words)
    if given.warmup >= given.steps:
        parser.error("--warmup has to be smaller than --steps")
    methods: tuple[Method, ...] = ("lora", "full") if given.method == "both" else (given.method,)
    setting = Setting(
        train=given.data[0].resolve(),
        dev=given.data[1].resolve(),
        methods=methods,
        batches=tuple(given.batch),
        steps=given.steps,
        repeats=given.repeats,
        warmup=given.warmup,
        max_tokens=given.max_tokens,
        vocab=given.vocab,
        heldout=given.heldout,
        seed=given.seed,
        threads=given.threads,
        tiny=given.tiny,
    )
    return setting, given.work, given.out


def main(words: Sequence[str]) -> None:
    setting, work, out = parse(words)
    source = origin(["python", "-m", "benchmarks.race.race", *words], {})
    out = out or ROOT / "benchmarks" / "results" / f"race-{source.date[:10]}-{setting.vocab}"
    with ExitStack() as stack:
        if work is None:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="race-")))
        work = work.resolve()
        work.mkdir(parents=True, exist_ok=True)
        race(setting, work, out, source)


if __name__ == "__main__":
    main(sys.argv[1:])
